"""Plugins that are broken in every way: the right message where each is met."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from helpers.planning import Told, command
from helpers.plugins import install, write_distribution
from helpers.training import context_for, model_artifact, preference_rows, train

from posttrain.contracts.component import Choice
from posttrain.contracts.registration import Group
from posttrain.errors import PluginError, TrainingDiverged
from posttrain.registry.discovery import discover
from posttrain_plugins.testing.losses.conformance import CHECKS
from posttrain_plugins.testing.losses.subject import loss_subject
from posttrain_plugins.testing.suites import Nonconformance

BROKEN = Path(__file__).parents[1] / "examples/broken"
PIPELINE = """\
name: broken
plugins: {plugins}
stages:
  pairs:
    uses: data.load
    with: {{path: pairs.jsonl}}
  base:
    uses: model.init
    inputs: {{data: pairs}}
  prefer:
    uses: train.cpo
    inputs: {{model: base, data: pairs}}
    with:
      loss: {loss}
"""

FOUND: Mapping[str, str] = {
    "import_error": "is import-error: ModuleNotFoundError: No module named 'acme_numerics_that_nobody_has'",
    "wrong_api": "is incompatible: wants posttrain API >=7,<8, this is 1; install another version",
    "taken_name": "is invalid: claims the taken name 'simpo' (loss, owned by posttrain); rename it or give it a "
    "namespace, such as 'yours/simpo'",
}
"""What is wrong with a plugin as soon as it is found."""
SIGNATURE = "__call__ must take (batch, config, stats, state)"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    lines = [json.dumps(row) + "\n" for row in preference_rows()]
    (tmp_path / "pairs.jsonl").write_text("".join(lines), encoding="utf-8")


def file(variant: str) -> Path:
    return BROKEN / f"{variant}.py"


def planned(loss: str, *files: Path) -> Told:
    text = PIPELINE.format(loss=loss, plugins=[str(each) for each in files])
    Path("broken.yaml").write_text(text, encoding="utf-8")
    return command("plan", "broken.yaml")


@pytest.mark.parametrize(("variant", "message"), FOUND.items())
def test_what_cannot_be_used_is_listed_with_the_reason(variant: str, message: str) -> None:
    listed = command("plugins", "list", "--file", file(variant))
    assert listed.code == 0
    assert f"plugin '{variant}.py' of {variant}.py {message}" in listed.out
    checked = command("plugins", "check", "--file", file(variant))
    assert checked.code == 1
    assert message in checked.out


@pytest.mark.parametrize(("variant", "message"), FOUND.items())
def test_a_pipeline_that_names_its_file_is_refused_at_that_line(variant: str, message: str) -> None:
    told = planned("simpo", file(variant))
    assert told.code == 2
    assert re.search(r"broken\.yaml:2:\d+: this plugin file cannot be used: ", told.err)
    assert message.removeprefix("is ") in told.err


def test_where_an_import_failed_is_named() -> None:
    assert f"({file('import_error')}:3)" in command("plugins", "list", "--file", file("import_error")).out


@pytest.mark.parametrize("variant", ["import_error", "wrong_api"])
def test_a_pipeline_that_asks_for_its_loss_hears_of_the_package(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "site"
    root.mkdir()
    write_distribution(root, "acme-broken", file(variant).read_text(encoding="utf-8"))
    install(root, monkeypatch)
    told = planned("acme/broken")
    assert told.code == 2
    assert re.search(r"broken\.yaml:\d+:\d+: there is no loss 'acme/broken'", told.err)
    assert f"plugin 'acme-broken' of acme-broken 1.0 {FOUND[variant]}" in told.err
    assert planned("simpo").code == 0


def test_a_taken_name_keeps_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "site"
    root.mkdir()
    write_distribution(root, "acme-simpo", file("taken_name").read_text(encoding="utf-8"))
    install(root, monkeypatch)
    assert discover().entry(Group.LOSS, "simpo").plugin.builtin
    told = planned("simpo")
    assert told.code == 0
    assert FOUND["taken_name"] in told.err


def test_a_wrong_signature_is_told_with_its_line_wherever_it_is_met() -> None:
    assert command("plugins", "list", "--file", file("wrong_signature")).code == 0
    place = f"{file('wrong_signature')}:8: the loss 'acme/broken' of wrong_signature.py breaks the contract"
    checked = command("plugins", "check", "--file", file("wrong_signature"))
    assert checked.code == 1
    assert place in checked.out and SIGNATURE in checked.out
    told = planned("acme/broken", file("wrong_signature"))
    assert told.code == 2
    assert re.search(r"broken\.yaml:14:13: the loss 'acme/broken'", told.err) and SIGNATURE in told.err
    with pytest.raises(PluginError, match=re.escape(SIGNATURE)):
        loss_subject("acme/broken", files=[file("wrong_signature")])
    broken = discover([file("wrong_signature")]).entry(Group.LOSS, "acme/broken").registration.load()
    with pytest.raises(
        Nonconformance, match=r"Broken \(wrong_signature\.py:8\) is no loss: __call__ must take"
    ):
        loss_subject(broken)


def test_a_gradient_that_is_no_number_is_found_by_the_kit() -> None:
    subject = loss_subject("acme/broken", files=[file("nan_gradient")])
    CHECKS["contract"](subject)
    with pytest.raises(
        Nonconformance, match=r"acme/broken \(nan_gradient\.py:8\): the gradient of `logp` is nan"
    ):
        CHECKS["finite"](subject)


def test_a_gradient_that_is_no_number_stops_training_before_an_update(tmp_path: Path) -> None:
    told = planned("acme/broken", file("nan_gradient"))
    assert told.code == 0
    context = context_for(
        tmp_path / "training",
        "train.cpo",
        model_artifact(tmp_path / "model"),
        preference_rows(),
        "preference",
    )
    context.config = context.config.model_copy(update={"loss": Choice(name="acme/broken")})
    context.components["acme/broken"] = discover([file("nan_gradient")]).load(Group.LOSS, "acme/broken")
    with pytest.raises(TrainingDiverged, match="the norm of the gradient is not finite") as caught:
        train(context)
    assert caught.value.where == "step 1"
    assert caught.value.found.endswith("with the loss `acme/broken`")
