"""The Python interface: a pipeline built, planned, run and resumed without the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.planning import PLUGIN, write_pipeline

import posttrain
from posttrain.contracts.runner import NodeResult, NodeStatus
from posttrain.errors import ExitCode, HandoffError, Interrupted, SpecError, StageError, StoreError
from posttrain.execution.records import find_run, run_state
from posttrain.execution.resumption import resumable
from posttrain.execution.session import RunReport
from posttrain.pipeline import Pipeline, Selection
from posttrain.planning.problems import SpecProblems
from posttrain.planning.spec import StageDefaults, StageSpec

CHAIN: dict[str, Any] = {
    "chats": {"uses": "try/rows"},
    "sft": StageSpec(uses="try/train", inputs={"data": "chats.train"}, with_={"seed": 1}),
    "eval": {"uses": "try/compare", "inputs": {"models": ("sft",)}},
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POSTTRAIN_DISABLE_PLUGINS", "flows")


def pipeline(**changes: Any) -> Pipeline:
    stages = {name: changes.get(name, stage) for name, stage in CHAIN.items()}
    return Pipeline(stages, name="mine", plugins=[str(PLUGIN)])


def test_a_pipeline_runs_and_reports() -> None:
    report = pipeline().run(runner="inline")
    assert isinstance(report, RunReport)
    assert (report.status, report.exit_code) == ("completed", ExitCode.OK)
    assert {name: result.status for name, result in report.results.items()} == dict.fromkeys(
        CHAIN, NodeStatus.COMPLETED
    )
    assert report.results["sft"].figures["loss"] == 0.123456789
    again = pipeline().run(runner="inline")
    assert set(result.status for result in again.results.values()) == {NodeStatus.CACHED}


def test_an_exception_reaches_the_caller_inline() -> None:
    broken = pipeline(sft={**CHAIN["sft"].model_dump(by_alias=True), "with": {"fail": "stop here"}})
    with pytest.raises(ValueError, match="stop here") as caught:
        broken.run(runner="inline")
    assert caught.traceback[-1].name == "train", "a debugger lands in the stage"
    assert run_state(find_run(Path(".posttrain"))).status == "failed"


def test_a_run_is_resumed_as_it_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = pipeline(sft={"uses": "try/train", "inputs": {"data": "chats.train"}, "with": {"fail": "no"}})
    with pytest.raises(ValueError):
        broken.run(runner="inline", selection=Selection(only=("sft",), tiny=True))
    record = find_run(Path(".posttrain"))
    again, selection, runner = Pipeline.recorded(record)
    assert (again.name, selection, runner) == ("mine", Selection(only=("sft",)), "inline")
    graph = again.graph(selection)
    assert graph.order == ("chats", "sft")
    assert (graph.nodes["chats"].config.rows, graph.nodes["sft"].config.steps) == (2, 2)
    with pytest.raises(ValueError):
        Pipeline.resume(Path(".posttrain"))


def test_what_is_recorded_has_places_and_no_secret() -> None:
    stage = {"uses": "try/train", "inputs": {"data": "chats.train"}, "with": {"token": "env:MY_TOKEN"}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MY_TOKEN", "canary-5c1b9e7a")
        pipeline(sft=stage).run(runner="inline")
    record = find_run(Path(".posttrain"))
    plan = json.loads((record.directory / "plan.json").read_text())
    (node,) = [each for each in plan["nodes"] if each["node"] == "sft"]
    assert node["origins"]["token"] == "stages.sft.with.token"
    assert record.pipeline()["spec"]["stages"]["sft"]["with"] == {"token": "env:MY_TOKEN"}
    for path in Path(".posttrain").rglob("*"):
        assert not path.is_file() or b"canary-5c1b9e7a" not in path.read_bytes(), path


def test_mistakes_are_named_by_their_key_path() -> None:
    with pytest.raises(SpecProblems, match=r"stages.sft.with.sed: there is no option 'sed'"):
        pipeline(sft={"uses": "try/train", "inputs": {"data": "chats.train"}, "with": {"sed": 1}}).graph()
    with pytest.raises(SpecProblems, match="this is no plain value") as caught:
        pipeline(sft={"uses": "try/train", "with": {"seed": object()}})
    assert caught.value.where == "stages.sft.with.seed"
    with pytest.raises(SpecProblems, match="unknown key `wiht`"):
        pipeline(sft={"uses": "try/train", "wiht": {}})


def test_defaults_may_be_objects() -> None:
    built = Pipeline(
        CHAIN, plugins=[str(PLUGIN)], defaults={"try/train": StageDefaults(with_={"learning_rate": 0.5})}
    )
    config = built.graph().nodes["sft"].config
    assert (config.learning_rate, config.seed) == (0.5, 1)


def test_relative_paths_start_at_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "deep"
    folder.mkdir()
    (folder / "plugin.py").write_text(PLUGIN.read_text())
    (folder / "rows.txt").write_text("sea")
    file = write_pipeline(
        folder / "p.yaml",
        "stages:\n  a: {uses: try/rows, with: {path: rows.txt}}\n",
        plugins=[Path("plugin.py")],
    )
    found = Pipeline.find(str(file))
    assert (found.name, found.plugin_files) == ("p", [folder / "plugin.py"])
    assert found.graph().nodes["a"].config.path == str(folder / "rows.txt")


def test_an_unknown_pipeline_or_runner_is_explained() -> None:
    with pytest.raises(SpecError, match="neither a pipeline file nor a recipe"):
        Pipeline.find("nosuch")
    with pytest.raises(SpecError, match="there is no such file"):
        Pipeline.find("nosuch.yaml")
    with pytest.raises(SpecError, match="there is no such runner") as caught:
        pipeline().run(runner="inlin")
    assert caught.value.fix == "did you mean `inline`?"
    assert not Path(".posttrain").exists()


def test_a_run_that_is_not_there_or_not_understood() -> None:
    with pytest.raises(StoreError):
        Pipeline.resume(Path(".posttrain"))
    pipeline().run(runner="inline")
    with pytest.raises(StoreError, match="no run was interrupted, was killed, or failed"):
        Pipeline.resume(Path(".posttrain"))
    record = find_run(Path(".posttrain"))
    with pytest.raises(StoreError, match="completed"):
        Pipeline.resume(Path(".posttrain"), record.run)
    (record.directory / "pipeline.json").write_text('{"stages": {}}')
    with pytest.raises(StoreError, match="not one of this version"):
        Pipeline.recorded(record)


def test_the_newest_unfinished_run_is_resumed() -> None:
    options = {"fail": "no"}
    broken = pipeline(sft={"uses": "try/train", "inputs": {"data": "chats.train"}, "with": options})
    with pytest.raises(ValueError):
        broken.run(runner="inline")
    unfinished = find_run(Path(".posttrain"))
    assert resumable(Path(".posttrain")) == unfinished
    pipeline().run(runner="inline")
    with pytest.raises(StoreError, match="but for those that a later run of their pipeline replaced"):
        resumable(Path(".posttrain"))
    (find_run(Path(".posttrain")).directory / "journal.jsonl").write_text("{}\n{}\n")
    assert resumable(Path(".posttrain")) == unfinished, "a damaged run is passed over"
    with pytest.raises(ValueError):
        Pipeline.resume(Path(".posttrain"))


def test_a_broken_guard_of_the_pipeline_is_no_warning() -> None:
    built = Pipeline(CHAIN, plugins=[str(PLUGIN), "nosuch.py"])
    with pytest.raises(SpecProblems, match="this plugin file cannot be used: import-error") as caught:
        built.plan()
    assert (caught.value.where, caught.value.found) == ("plugins.1", str(Path("nosuch.py").absolute()))


def test_pipeline_is_public() -> None:
    assert posttrain.Pipeline is Pipeline


def test_a_report_can_be_required_to_be_complete() -> None:
    good = RunReport("r", "completed", {})
    assert good.require_completed() is good
    failed = NodeResult("sft", NodeStatus.FAILED, summary="out of luck")
    waiting = NodeResult("dpo", NodeStatus.SKIPPED)
    with pytest.raises(StageError, match="sft") as caught:
        RunReport("r", "failed", {"dpo": waiting, "sft": failed}).require_completed()
    assert caught.value.found == "out of luck" and "resume r" in str(caught.value.fix)
    with pytest.raises(Interrupted):
        RunReport("r", "interrupted", {}).require_completed()
    with pytest.raises(HandoffError):
        RunReport("r", "rejected", {}).require_completed()


def test_a_plan_names_the_components_that_are_in_no_key() -> None:
    stages = {
        "task": {"uses": "data.synthetic", "with": {"generator": "reverse", "rows": 20}},
        "base": {"uses": "model.init", "inputs": {"data": ["task"]}},
        "sft": {
            "uses": "train.sft",
            "inputs": {"model": "base", "data": "task"},
            "with": {"backend": {"name": "ddp", "ranks": 2}},
        },
    }
    node = Pipeline(stages, name="mine").plan().nodes["sft"]
    assert node.means == {"with.backend": "ddp"}
    assert "with.backend" not in node.plugins
    assert node.as_dict()["means"] == {"with.backend": "ddp"}
