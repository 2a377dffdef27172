"""Looking plugins up, and the contracts that a loaded one is checked against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from helpers.plugins import catalogue_of, install, plugin, write_distribution
from pydantic import ConfigDict, Field

from posttrain.artifacts.kinds import Kind
from posttrain.contracts.component import Config
from posttrain.contracts.loss import Family, Loss, Need
from posttrain.contracts.registration import Group, Registration
from posttrain.contracts.rule import Rule
from posttrain.contracts.stage import Level, Port, Stage, StageConfig
from posttrain.contracts.trainer import Trainer
from posttrain.errors import PluginError
from posttrain.registry.discovery import discover

REPORT = Port("report", frozenset({Kind.REPORT}))


class Options(StageConfig):
    size: int = 1


class GoodStage(Stage):
    config = Options
    inputs = (Port("model", frozenset({Kind.MODEL})),)
    target = "some.module:run"
    tiny = {"size": 1}

    def outputs(self, config: Any) -> tuple[Port, ...]:
        return (REPORT,)


class GoodTrainer(Trainer):
    config = Options
    target = "some.module:run"
    family = Family.TOKEN
    formats = frozenset({"messages"})

    def outputs(self, config: Any) -> tuple[Port, ...]:
        return (REPORT,)

    def passages(self, row: Mapping[str, Any], format: Any) -> Sequence[Any] | str:
        return "dropped"

    def batch(self, scored: Sequence[Any], config: Any) -> Any:
        return None


class GoodLoss(Loss):
    family = Family.TOKEN

    def __call__(self, batch: Any, config: Any, stats: Any, state: Any) -> Any:
        return None


class GoodReward:
    config = Config

    def __call__(self, samples: Any, config: Any) -> list[float | None]:
        return []


class GoodGenerator:
    format = "prompt"
    columns = ("prompt",)

    def __call__(self, config: Any, rows: int, seed: int) -> Any:
        return iter(())


class GoodRule(Rule):
    """Nothing goes wrong."""

    code = "ACME01"
    title = "nothing"
    level = Level.NOTE
    fix = "nothing"

    def check(self, site: Any) -> Any:
        return ()


class GoodRunner:
    def run(self, execution: Any) -> Any:
        return {}


class GoodTracker:
    def sync(self, workspace: Path, run: str) -> None: ...

    def behind(self, workspace: Path, run: str) -> bool:
        return False


def good_command() -> None: ...


GOOD = {
    "stages": (Group.STAGE, GoodStage),
    "trainers": (Group.TRAINER, GoodTrainer),
    "losses": (Group.LOSS, GoodLoss),
    "rewards": (Group.REWARD, GoodReward),
    "generators": (Group.GENERATOR, GoodGenerator),
    "rules": (Group.RULE, GoodRule),
    "runners": (Group.RUNNER, GoodRunner),
    "trackers": (Group.TRACKER, GoodTracker),
    "commands": (Group.COMMAND, good_command),
}


class Lax(Config):
    model_config = ConfigDict(extra="ignore")


class Aliased(Config):
    lam: float = Field(default=1.0, alias="lambda")


class Named(Config):
    name: str = ""


class NoOutputs(Stage):
    target = "a:b"


class Abstract(Trainer):
    target = "a:b"
    family = Family.TOKEN
    formats = frozenset({"messages"})

    def outputs(self, config: Any) -> tuple[Port, ...]:
        return ()


def variant(base: type, **attributes: Any) -> type:
    return type("Variant", (base,), attributes)


def needs_argument(self: Any, argument: int) -> None: ...


TWICE = (Port("model", frozenset({Kind.MODEL})), Port("model", frozenset({Kind.ADAPTER})))

BAD: list[tuple[str, Any, str]] = [
    ("stages", GoodLoss, "must be a subclass of posttrain.Stage"),
    ("stages", GoodStage(), "must be a subclass of posttrain.Stage"),
    ("stages", type("Shares", (GoodStage,), {"shared": {"loop": "1"}}), "`shared` must map names"),
    ("stages", NoOutputs, "does not define outputs"),
    ("stages", variant(GoodStage, target=None), "`target` must be 'module:function', but is None"),
    (
        "stages",
        variant(GoodStage, target="module.run"),
        "`target` must be 'module:function', but is 'module.run'",
    ),
    ("stages", variant(GoodStage, config=Config), "`config` must be a subclass of posttrain.StageConfig"),
    ("stages", variant(GoodStage, inputs=TWICE), "the input port 'model' is declared 2 times"),
    ("stages", variant(GoodStage, inputs=["model"]), "`inputs` must be a tuple of posttrain.Port"),
    ("stages", variant(GoodStage, tiny={"sise": 1}), "`tiny` sets 'sise', which is no option"),
    ("stages", variant(GoodStage, __init__=needs_argument), "the constructor must take ()"),
    ("trainers", GoodStage, "must be a subclass of posttrain.Trainer"),
    ("trainers", Abstract, "does not define batch"),
    ("trainers", variant(GoodTrainer, family="token"), "`family` must be a posttrain.Family"),
    ("trainers", variant(GoodTrainer, formats={"messages"}), "`formats` must be a frozenset"),
    ("losses", variant(GoodLoss, family=None), "`family` must be a posttrain.Family"),
    (
        "losses",
        variant(GoodLoss, __call__=lambda self, batch: None),
        "__call__ must take (batch, config, stats, state)",
    ),
    ("losses", type("Bare", (), {"family": Family.TOKEN}), "must be a subclass of posttrain.Loss"),
    ("losses", type("Silent", (Loss,), {"family": Family.TOKEN}), "it defines no __call__(batch"),
    ("losses", variant(GoodLoss, measure=lambda self, batch: {}), "measure must take (batch, config, state)"),
    ("losses", variant(GoodLoss, begin=lambda self: {}), "begin must take (config)"),
    ("losses", variant(GoodLoss, advance=lambda self, state: {}), "advance must take (state, stats, config)"),
    ("losses", variant(GoodLoss, needs={"reference"}), "`needs` must be a frozenset of posttrain.Need"),
    (
        "losses",
        variant(GoodLoss, family=Family.TOKEN, needs=frozenset({Need.REFERENCE})),
        "it needs `reference`, which no batch of the family token holds",
    ),
    (
        "losses",
        variant(GoodLoss, family=Family.PREFERENCE, needs=frozenset({Need.MISMATCHED})),
        "it needs `mismatched`, which no batch of the family preference holds",
    ),
    ("losses", variant(GoodLoss, scope="step"), "`scope` must be a posttrain.Scope"),
    ("losses", variant(GoodLoss, config=dict), "`config` must be a subclass of posttrain.Config"),
    ("losses", variant(GoodLoss, config=Lax), "must keep extra='forbid' and frozen=True"),
    ("losses", variant(GoodLoss, config=Aliased), "the option 'lam' has an alias"),
    ("losses", variant(GoodLoss, config=Named), "an option cannot be called 'name'"),
    ("rewards", object, "must be callable with (samples, config), but defines no __call__"),
    ("rewards", lambda samples: [], "it must take (samples, config)"),
    ("rewards", 3, "it is not callable"),
    ("generators", variant(GoodGenerator, columns=None), "`columns` must be a tuple of column names"),
    ("generators", variant(GoodGenerator, format=None), "`format` must be a dataset format"),
    (
        "generators",
        variant(GoodGenerator, __call__=lambda self, config: ()),
        "must take (config, rows, seed)",
    ),
    ("rules", GoodRule(), "must be a subclass of posttrain.Rule"),
    ("rules", GoodLoss, "must be a subclass of posttrain.Rule"),
    ("rules", variant(GoodRule, code="acme-1"), "`code` must be letters and a number"),
    ("rules", variant(GoodRule, code=None), "`code` must be letters and a number"),
    ("rules", variant(GoodRule, title=""), "`title` must be one line of text"),
    ("rules", variant(GoodRule, fix="a\nb"), "`fix` must be one line of text"),
    ("rules", variant(GoodRule, level="error"), "`level` must be a posttrain.Level"),
    ("rules", variant(GoodRule, __doc__=None), "no docstring"),
    ("rules", variant(GoodRule, check=lambda self: ()), "check must take (site)"),
    ("runners", GoodRule, "run is missing"),
    ("trackers", variant(GoodTracker, behind=None), "behind is missing"),
    ("commands", "os:sep", "must be a function, but is '/'"),
]


@pytest.mark.parametrize("hook", GOOD)
def test_what_keeps_its_contract_loads(hook: str) -> None:
    group, target = GOOD[hook]
    assert catalogue_of(**{hook: [Registration("it", "s", target)]}).load(group, "it") is target


@pytest.mark.parametrize(("hook", "target", "message"), BAD)
def test_what_breaks_its_contract_is_refused(hook: str, target: Any, message: str) -> None:
    group, good = GOOD[hook]
    catalogue = catalogue_of(**{hook: [Registration("bad", "s", target), Registration("good", "s", good)]})
    with pytest.raises(PluginError) as error:
        catalogue.load(group, "bad")
    assert f"the {group} 'bad' of memory breaks the contract of a {group}: " in str(error.value)
    assert message in error.value.message
    assert catalogue.load(group, "good") is good


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


def losses(*names: str) -> list[Registration]:
    return [Registration(name, "s", GoodLoss) for name in names]


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
