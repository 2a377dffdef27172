"""Plans: what is cached, stale, waiting or blocked and why, what is refused, and what broken plugins do to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.planning import CHAIN, PLUGIN, write_pipeline
from helpers.planning_stages import STAGES
from helpers.plugins import plugin

from posttrain.artifacts.store import Store
from posttrain.contracts.registration import Registration
from posttrain.contracts.rule import Rule
from posttrain.contracts.stage import Certainty, Estimate, Level, Stage
from posttrain.errors import HandoffError, PluginError, SpecError, StoreError
from posttrain.pipeline import Pipeline, Selection, require_allowed
from posttrain.planning import versions
from posttrain.planning.graph import Reference, build_graph
from posttrain.planning.parsing import parse, resolved
from posttrain.planning.plan import Plan, Standing
from posttrain.planning.planner import Planner
from posttrain.planning.source import Source
from posttrain.registry.catalogue import Catalogue
from posttrain.registry.discovery import discover

CATALOGUE = discover([PLUGIN], installed=False)


class Bench:
    """One pipeline file in one workspace, planned and run without any other plugin."""

    def __init__(self, base: Path, text: str = CHAIN) -> None:
        self.base = base
        self.workspace = base / ".posttrain"
        self.text = text
        self.catalogue = CATALOGUE

    def pipeline(self, *sets: str) -> Pipeline:
        file = write_pipeline(self.base / "pipeline.yaml", self.text)
        pipeline = Pipeline.from_file(file, sets)
        pipeline.__dict__["catalogue"] = self.catalogue
        return pipeline

    def plan(self, *sets: str, **selection: Any) -> Plan:
        return self.pipeline(*sets).plan(self.workspace, Selection(**selection))

    def run(self, *sets: str, **selection: Any) -> Mapping[str, str]:
        report = self.pipeline(*sets).run(
            self.workspace, runner="inline", selection=Selection(**selection), track=False
        )
        return {name: result.status.value for name, result in report.results.items()}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def standings(plan: Plan) -> dict[str, str]:
    return {name: node.standing.value for name, node in plan.nodes.items()}


def test_everything_is_new_then_cached(bench: Bench) -> None:
    assert standings(bench.plan()) == dict.fromkeys(["chats", "sft", "dpo", "eval"], "new")
    bench.run()
    plan = bench.plan()
    assert standings(plan) == dict.fromkeys(["chats", "sft", "dpo", "eval"], "cached")
    assert plan.nothing_to_do and not plan.refused and not plan.unbuilt
    node = plan.nodes["sft"]
    assert node.record is not None and node.record.key == node.key
    assert plan.outputs[Reference("sft", "model")].verified


def test_a_change_in_the_middle_concerns_what_follows_alone(bench: Bench) -> None:
    bench.run()
    plan = bench.plan("stages.sft.with.loss.beta=0.2")
    assert standings(plan) == {"chats": "cached", "sft": "stale", "dpo": "waits", "eval": "waits"}
    assert plan.nodes["sft"].reasons == ("with.loss.beta: 0.1 → 0.2",)
    assert plan.nodes["dpo"].reasons == ("waits for sft",)
    assert plan.nodes["eval"].reasons == ("waits for sft, dpo",)
    assert not plan.nothing_to_do
    changed = bench.run("stages.sft.with.loss.beta=0.2")
    assert changed == {"chats": "cached", "sft": "completed", "dpo": "completed", "eval": "completed"}
    assert bench.plan().nothing_to_do, "the first version is still in the store"


def test_a_change_in_the_middle_and_one_after_it(bench: Bench) -> None:
    bench.run()
    plan = bench.plan("stages.sft.with.seed=1", "stages.dpo.with.seed=2")
    assert plan.nodes["dpo"].standing is Standing.STALE
    assert plan.nodes["dpo"].reasons == ("with.seed: 0 → 2", "waits for sft")


def test_only_what_is_selected_is_run_and_reused_later(bench: Bench) -> None:
    assert bench.run(only=("sft",)) == {"chats": "completed", "sft": "completed"}
    plan = bench.plan()
    assert standings(plan) == {"chats": "cached", "sft": "cached", "dpo": "new", "eval": "new"}
    assert bench.run() == {"chats": "cached", "sft": "cached", "dpo": "completed", "eval": "completed"}


def test_what_comes_before_from_must_be_cached(bench: Bench) -> None:
    plan = bench.plan(start=("dpo",))
    assert plan.unbuilt == plan.as_dict()["unbuilt"] == ["chats", "sft"]
    with pytest.raises(SpecError, match="come before the selection") as caught:
        require_allowed(plan)
    assert (caught.value.where, caught.value.found) == ("--from", "chats, sft")
    with pytest.raises(SpecError):
        bench.run(start=("dpo",))
    assert not (bench.workspace / "runs").exists()
    bench.run(only=("sft",))
    assert bench.plan(start=("dpo",)).unbuilt == []
    assert bench.run(start=("dpo",))["dpo"] == "completed"


def test_a_cached_rejection_blocks_what_depends_on_it(bench: Bench) -> None:
    bench.text = CHAIN + (
        "      gate: {uses: try/compare, inputs: {models: dpo}, with: {verdict: rejected}}\n"
        "      out: {uses: try/publish, inputs: {model: dpo, report: gate}}\n"
        "      after: {uses: try/rows, needs: [out]}\n"
    )
    assert bench.run()["out"] == "skipped"
    plan = bench.plan()
    assert (plan.nodes["gate"].standing, plan.nodes["gate"].stops) == (Standing.CACHED, True)
    assert (plan.nodes["out"].standing, plan.nodes["out"].reasons) == (
        Standing.BLOCKED,
        ("gate said rejected",),
    )
    assert plan.nodes["after"].reasons == ("out said blocked",)
    assert plan.nothing_to_do
    assert bench.plan("stages.gate.with.verdict=completed").nodes["out"].standing is Standing.NEW


def test_a_removed_output_makes_its_node_stale(bench: Bench) -> None:
    bench.run()
    plan = bench.plan()
    record = plan.nodes["eval"].record
    assert record is not None
    target = bench.workspace / "store" / "objects" / record.outputs["report"]
    for path in (target, target.parent):
        path.chmod(0o755)
    target.rename(bench.base / "gone")
    node = bench.plan().nodes["eval"]
    assert node.standing is Standing.STALE
    assert node.reasons and record.outputs["report"][:12] in node.reasons[0]


def test_a_damaged_record_of_another_key_stops_no_plan(bench: Bench) -> None:
    bench.run("stages.sft.with.seed=1")
    bench.run()
    needed = bench.plan().nodes["sft"].key
    (other,) = [r.key for r in Store(bench.workspace).records() if r.node == "sft" and r.key != needed]
    (bench.workspace / "store/keys" / f"{other}.json").write_text("{")
    plan = bench.plan()
    assert plan.nothing_to_do
    assert plan.warnings == (f"key record {other[:12]} is damaged, `posttrain store gc` removes it",)
    (bench.workspace / "store/keys" / f"{needed}.json").write_text("{")
    with pytest.raises(StoreError, match="damaged"):
        bench.plan()


def test_a_node_is_compared_with_its_own_pipeline(bench: Bench) -> None:
    bench.run("name=first")
    plan = bench.plan("name=second", "stages.sft.with.seed=1")
    assert (plan.nodes["sft"].standing, plan.nodes["sft"].reasons) == (Standing.NEW, ())
    assert plan.nodes["chats"].standing is Standing.CACHED, "the key knows no pipeline"
    plan = bench.plan("name=first", "stages.sft.with.seed=1")
    assert plan.nodes["sft"].reasons == ("with.seed: 0 → 1",)


def test_a_plan_writes_nothing(bench: Bench) -> None:
    bench.plan()
    assert not bench.workspace.exists()


def test_a_plan_writes_the_memo_of_sources_alone(bench: Bench) -> None:
    (bench.base / "rows.txt").write_text("sea")
    bench.text = "stages:\n  chats: {uses: try/rows, with: {path: rows.txt}}\n"
    bench.plan()
    written = {str(path.relative_to(bench.workspace)) for path in bench.workspace.rglob("*")}
    assert written <= {"store", "store/digests.sqlite"}


def test_a_missing_source_is_a_finding(bench: Bench) -> None:
    bench.text = "stages:\n  chats: {uses: try/rows, with: {path: gone.txt}}\n"
    plan = bench.plan()
    (finding,) = plan.refused
    assert finding.rule == "source"
    assert f"with.path: this source does not exist: {bench.base / 'gone.txt'}" in finding.message
    with pytest.raises(HandoffError, match="this source does not exist"):
        bench.run()
    assert not (bench.workspace / "runs").exists()


def test_a_changed_source_is_told(bench: Bench) -> None:
    (bench.base / "rows.txt").write_text("sea")
    bench.text = "stages:\n  chats: {uses: try/rows, with: {path: rows.txt}}\n"
    bench.run()
    (bench.base / "rows.txt").write_text("see!")
    assert bench.plan().nodes["chats"].reasons == ("the content of with.path changed",)


class TestFindings:
    RATE = CHAIN.replace("inputs: {data: chats.train}}", "inputs: {data: chats.train}, with: WITH}")

    def test_a_predicted_error_refuses_before_anything_starts(self, bench: Bench) -> None:
        bench.text = self.RATE.replace("WITH", "{learning_rate: 2}")
        plan = bench.plan()
        (finding,) = plan.refused
        assert (finding.node, finding.certainty) == ("sft", Certainty.PREDICTED)
        assert plan.as_dict()["refused"] == 1
        with pytest.raises(HandoffError, match="this rate is absurd") as caught:
            bench.run()
        assert (caught.value.where, caught.value.fix) == ("sft.data", "lower it")
        assert not (bench.workspace / "runs").exists()

    def test_an_unknown_error_does_not_until_it_is_verified(self, bench: Bench) -> None:
        bench.text = self.RATE.replace("WITH", "{learning_rate: 2, seed: 1}")
        plan = bench.plan()
        (finding,) = plan.nodes["sft"].findings
        assert (plan.refused, finding.certainty) == ([], Certainty.UNKNOWN)
        assert bench.run()["sft"] == "failed"
        (finding,) = bench.plan().refused
        assert finding.certainty is Certainty.VERIFIED

    def test_several_are_told_together(self, bench: Bench) -> None:
        bench.text = self.RATE.replace("WITH", "{learning_rate: 2}").replace(
            "{loss:", "{learning_rate: 2, loss:"
        )
        with pytest.raises(HandoffError) as caught:
            require_allowed(bench.plan())
        assert caught.value.found is None, "the same words for another node are not repeated"


def test_what_is_known_of_a_node(bench: Bench) -> None:
    node = bench.plan("stages.sft.with.token=env:HF_TOKEN").nodes["sft"].as_dict()
    assert node["estimate"] == {
        "parameters": 1500,
        "trainable": 500,
        "memory_bytes": 3 * 2**20,
        "note": "float32",
    }
    (digest,) = {CATALOGUE.entry("loss", "margin").plugin.digest}  # type: ignore[arg-type]
    assert node["plugins"] == {
        "try/train": {"name": "try/train", "file": digest},
        "with.loss": {"name": "try/margin", "file": digest},
    }
    assert node["launch"][1:] == ["-m", "posttrain.execution", "request.json"]
    assert node["inputs"] == {"data": ["chats.train"]}
    assert node["config"]["loss"] == {"name": "try/margin", "beta": 0.1}
    assert node["config"]["token"] == "env:HF_TOKEN"
    assert (node["origins"]["token"], node["origins"]["seed"]) == ("--set stages.sft.with.token", "default")


def test_another_interpreter_is_launched(bench: Bench) -> None:
    bench.text = "stages:\n  a: {uses: try/rows, runtime: {python: /opt/python}}\n"
    assert bench.plan().nodes["a"].launch[0] == "/opt/python"


def test_versions_that_moved_on_are_told_and_nothing_more(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.run()
    now = dict(versions.current_versions())
    assert bench.plan().nodes["sft"].drift == ()
    monkeypatch.setattr(versions, "current_versions", lambda: {**now, "python": "9.9.9"})
    node = bench.plan().nodes["sft"]
    assert node.standing is Standing.CACHED
    assert node.drift == (f"python {now['python']} → 9.9.9",)


# Broken plugins


class _Rows(Stage):
    config = STAGES["rows"].config
    target = "nowhere:nothing"

    def outputs(self, config: Any) -> Any:
        return STAGES["rows"].outputs(self, config)  # type: ignore[arg-type]


def broken(base: type[Stage] = _Rows, **methods: Any) -> type[Stage]:
    return type("Broken", (base,), {"__module__": __name__, **methods})


def raising(error: BaseException) -> Any:
    def method(self: Any, *arguments: Any) -> Any:
        raise error

    return method


def plan_of(stage: type[Stage], tmp_path: Path, rules: Sequence[Registration] = ()) -> Plan:
    stages = [Registration("rows", "rows", stage)]
    catalogue: Catalogue = discover(extra=[plugin("acme", stages=stages, rules=rules)], installed=False)
    source = Source("pipeline", {"stages": {"a": {"uses": "rows"}, "b": {"uses": "rows", "needs": ["a"]}}})
    graph = build_graph(resolved(parse(source), source), catalogue, tmp_path)
    return Planner(graph, catalogue, Store(tmp_path / ".posttrain"), ("python",)).plan("test", "0" * 64)


@pytest.mark.parametrize("error", [ZeroDivisionError("oops"), SystemExit(3), AssertionError()])
def test_a_check_that_raises_is_an_error_of_its_own(error: BaseException, tmp_path: Path) -> None:
    plan = plan_of(broken(check=raising(error)), tmp_path)
    finding = plan.refused[0]
    assert (finding.rule, finding.node, finding.level) == ("rows", "a", Level.ERROR)
    assert f"`check` of the stage rows of acme failed at a: {type(error).__name__}" in finding.message
    assert "test_planning_plan.py:" in finding.message


@pytest.mark.parametrize(("answer", "kind"), [(None, "NoneType"), (["no"], "str"), (3, "int")])
def test_a_check_that_answers_nonsense_is_an_error(answer: Any, kind: str, tmp_path: Path) -> None:
    plan = plan_of(broken(check=lambda self, config, inputs: answer), tmp_path)
    assert "TypeError" in plan.refused[0].message and kind in plan.refused[0].message


class Raises(Rule):
    """A rule."""

    code, title, level, fix = "ODD01", "odd", Level.NOTE, "nothing"

    def check(self, site: Any) -> Any:
        raise LookupError("no such fact")
        yield


class RaisesOwn(Raises):
    """A rule that raises one of posttrain's own errors."""

    def check(self, site: Any) -> Any:
        raise SpecError("this cannot be judged", found="nothing", fix="wait")


class Unmakeable(Raises):
    """A rule whose constructor fails."""

    def __init__(self) -> None:
        raise OSError("no")


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Raises, "the rule odd of acme failed at a: LookupError: no such fact"),
        (RaisesOwn, "this cannot be judged: nothing"),
        (Unmakeable, "the rule 'odd' of acme cannot be made: OSError: no"),
    ],
)
def test_a_rule_that_raises_is_an_error_of_its_own(rule: type, message: str, tmp_path: Path) -> None:
    plan = plan_of(_Rows, tmp_path, [Registration("odd", "odd", rule)])
    assert [finding.node for finding in plan.refused] == ["a", "b"]
    assert plan.refused[0].rule == "odd"
    assert plan.refused[0].message.startswith(message)


def test_an_estimate_that_raises_is_a_warning(tmp_path: Path) -> None:
    plan = plan_of(broken(estimate=raising(RuntimeError("hm"))), tmp_path)
    (finding,) = plan.nodes["a"].findings
    assert (finding.level, plan.refused) == (Level.WARNING, [])
    assert "`estimate` of the stage rows of acme failed at a: RuntimeError: hm" in finding.message
    plan = plan_of(broken(estimate=lambda self, config, inputs, gpus: {"parameters": 1}), tmp_path)
    assert "a dict where a Estimate was expected" in plan.nodes["a"].findings[0].message
    assert plan_of(broken(estimate=lambda self, c, i, g: Estimate(1)), tmp_path).nodes[
        "a"
    ].estimate == Estimate(1)


@pytest.mark.parametrize(
    "methods",
    [
        {"predict": raising(KeyError("model"))},
        {"predict": lambda self, config, inputs: {"train": "a dataset"}},
        {"prompts": raising(KeyError("model"))},
    ],
)
def test_a_stage_that_cannot_predict_names_its_plugin(methods: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="of the stage rows of acme failed at a") as caught:
        plan_of(broken(**methods), tmp_path)
    assert caught.value.fix is not None


def test_posttrains_own_errors_pass_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="not like this"):
        plan_of(broken(predict=raising(SpecError("not like this"))), tmp_path)


def test_an_interrupt_passes(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        plan_of(broken(check=raising(KeyboardInterrupt())), tmp_path)


def test_plugins_that_do_not_count_are_told(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("raise RuntimeError('no')\n")
    bench.catalogue = discover([PLUGIN, tmp_path / "bad.py"], installed=False)
    plan = bench.plan()
    (warning,) = plan.warnings
    assert "bad" in warning and "RuntimeError: no" in warning
    assert plan.as_dict()["warnings"] == [warning]


def test_a_tiny_run_has_keys_and_a_digest_of_its_own(bench: Bench) -> None:
    tiny, full = bench.plan(tiny=True), bench.plan()
    assert tiny.spec_digest != full.spec_digest
    assert tiny.nodes["chats"].key != full.nodes["chats"].key
    assert bench.run(tiny=True)["eval"] == "completed"
    assert bench.plan(tiny=True).nothing_to_do
    assert standings(bench.plan())["chats"] == "stale"
