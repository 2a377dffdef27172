"""Looking plugins up by name, and whom a failure is blamed on."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from helpers.contracts_kept import (
    GoodLoss,
    GoodReward,
    GoodStage,
    GoodTrainer,
    losses,
    variant,
)
from helpers.plugins import catalogue_of, install, plugin, write_distribution

from posttrain.contracts.registration import Group, Registration
from posttrain.errors import PluginError
from posttrain.registry.discovery import discover


def test_a_recipe_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "dpo.yaml").write_text("stages: {}\n")
    items = [
        Registration("dpo", "s", str(tmp_path / "dpo.yaml")),
        Registration("sft", "s", str(tmp_path / "sft.yaml")),
    ]
    catalogue = catalogue_of(recipes=items)
    assert catalogue.load(Group.RECIPE, "dpo") == tmp_path / "dpo.yaml"
    with pytest.raises(PluginError, match="there is no file"):
        catalogue.load(Group.RECIPE, "sft")


def test_a_recipe_is_found_beside_its_plugin(tmp_path: Path) -> None:
    (tmp_path / "dpo.yaml").write_text("stages: {}\n")
    source = 'import posttrain\nPOSTTRAIN_API = ">=1"\n@posttrain.hookimpl\ndef posttrain_recipes():\n'
    (tmp_path / "recipes.py").write_text(
        f'{source}    return [posttrain.Registration("dpo", "s", "dpo.yaml")]\n'
    )
    catalogue = discover([tmp_path / "recipes.py"], installed=False)
    assert catalogue.load(Group.RECIPE, "dpo") == tmp_path / "dpo.yaml"


def test_a_target_that_cannot_be_imported_is_blamed_on_its_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = """\
        import posttrain
        POSTTRAIN_API = ">=1,<2"

        @posttrain.hookimpl
        def posttrain_losses():
            return [posttrain.Registration("acme/simpo2", "s", "acme_heavy:Simpo2")]
        """
    write_distribution(tmp_path, "acme-losses", source)
    (tmp_path / "acme_heavy.py").write_text("print('hello')\nimport no_such_thing\n")
    install(tmp_path, monkeypatch)
    catalogue = discover(allow=["acme-losses"])
    with pytest.raises(PluginError) as error:
        catalogue.load(Group.LOSS, "simpo2")
    assert error.value.where == f"{tmp_path / 'acme_heavy.py'}:2"
    assert (
        "the loss 'acme/simpo2' of acme-losses 1.0 cannot be imported: ModuleNotFoundError"
        in error.value.message
    )
    assert capsys.readouterr().out == ""


def test_a_missing_attribute_of_a_target() -> None:
    with pytest.raises(PluginError, match="cannot be imported: AttributeError"):
        catalogue_of(losses=[Registration("x", "s", "posttrain.errors:Nothing")]).load(Group.LOSS, "x")


def test_a_failing_constructor_is_blamed_on_its_plugin() -> None:
    def fail(self: Any) -> None:
        raise RuntimeError("no")

    items = [Registration("x", "s", variant(GoodStage, __init__=fail))]
    with pytest.raises(PluginError, match="the stage 'x' of memory cannot be made: RuntimeError: no"):
        catalogue_of(stages=items).stage("x")


def test_trainers_are_stages() -> None:
    catalogue = catalogue_of(
        stages=[Registration("load", "s", GoodStage)], trainers=[Registration("train.x", "s", GoodTrainer)]
    )
    assert catalogue.names(Group.STAGE) == ["load"]
    assert catalogue.names(Group.TRAINER) == ["train.x"]
    assert catalogue.stages() == ["load", "train.x"]
    stage = catalogue.stage("train.x")
    assert isinstance(stage, GoodTrainer) and catalogue.stage("train.x") is stage
    assert catalogue.entry(Group.STAGE, "train.x").group is Group.TRAINER
    with pytest.raises(PluginError, match="there is no trainer 'load'"):
        catalogue.entry(Group.TRAINER, "load")
    assert [(entry.group, entry.registration.name) for entry in catalogue.entries()] == [
        (Group.STAGE, "load"),
        (Group.TRAINER, "train.x"),
    ]


def test_a_stage_and_a_trainer_of_one_name_conflict() -> None:
    one = plugin("one", stages=[Registration("train.x", "s", GoodStage)])
    two = plugin("two", trainers=[Registration("train.x", "s", GoodTrainer)])
    catalogue = discover(extra=[one, two], installed=False)
    with pytest.raises(PluginError, match="claimed by 2 plugins"):
        catalogue.stage("train.x")
    assert catalogue.stages() == []


def test_short_names() -> None:
    catalogue = catalogue_of(losses=losses("acme/simpo2", "acme/dpo", "dpo", "acme/kto", "other/kto"))
    assert catalogue.entry(Group.LOSS, "simpo2").registration.name == "acme/simpo2"
    assert catalogue.entry(Group.LOSS, "acme/simpo2").registration.name == "acme/simpo2"
    assert catalogue.entry(Group.LOSS, "dpo").registration.name == "dpo"
    with pytest.raises(PluginError, match="the loss 'kto' is ambiguous") as error:
        catalogue.entry(Group.LOSS, "kto")
    assert error.value.found == "acme/kto, other/kto"
    assert [
        catalogue.aliases(Group.LOSS, name) for name in ("acme/simpo2", "acme/dpo", "acme/kto", "dpo")
    ] == [
        ["acme/simpo2", "simpo2"],
        ["acme/dpo"],
        ["acme/kto"],
        ["dpo"],
    ]


def test_unknown_names_get_advice() -> None:
    catalogue = catalogue_of(
        losses=losses("sigmoid", "acme/hinge"), rewards=[Registration("exact", "s", GoodReward)]
    )
    with pytest.raises(PluginError, match="there is no loss 'sigmod'") as error:
        catalogue.entry(Group.LOSS, "sigmod")
    assert error.value.fix == "did you mean `sigmoid`?"
    assert error.value.expected == "one of acme/hinge, sigmoid"
    with pytest.raises(PluginError) as error:
        catalogue.entry(Group.LOSS, "hing")
    assert error.value.fix == "did you mean `hinge`?"
    with pytest.raises(PluginError) as error:
        catalogue.entry(Group.LOSS, "exact")
    assert error.value.fix == "'exact' is a reward, not a loss"
    with pytest.raises(PluginError) as error:
        catalogue.entry(Group.RUNNER, "zzz")
    assert (error.value.expected, error.value.fix) == (None, "`posttrain plugins list` shows every runner")


def test_identities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """\
        import posttrain
        POSTTRAIN_API = ">=1,<2"

        @posttrain.hookimpl
        def posttrain_losses():
            return [posttrain.Registration("NAME", "s", "a:b", numerics=3)]
        """
    write_distribution(tmp_path, "posttrain", source.replace("NAME", "nll"), module="fake_core")
    write_distribution(tmp_path, "acme-losses", source.replace("NAME", "acme/simpo2"))
    install(tmp_path, monkeypatch)
    catalogue = discover()
    assert catalogue.identity(Group.LOSS, "nll") == {"name": "nll", "numerics": 3}
    third_party = {"name": "acme/simpo2", "numerics": 3, "distribution": "acme-losses", "version": "1.0"}
    assert catalogue.identity(Group.LOSS, "acme/simpo2") == third_party
    assert catalogue.identity(Group.LOSS, "simpo2") == third_party


def test_targets_are_loaded_once() -> None:
    class Counted(GoodLoss):
        made: ClassVar[int] = 0

        def __init__(self) -> None:
            type(self).made += 1

    catalogue = catalogue_of(losses=[Registration("x", "s", Counted)])
    assert catalogue.load(Group.LOSS, "x") is catalogue.load(Group.LOSS, "x")
    assert Counted.made == 0
    assert catalogue.make(Group.LOSS, "x") is not catalogue.make(Group.LOSS, "x")
    assert Counted.made == 2
