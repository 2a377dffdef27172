"""The tiny pipeline through the command, from an empty directory to a promoted model, and then changed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers.products import NODES, Done, Product, Tracked, processes_in, steps_of

pytestmark = [pytest.mark.slow, pytest.mark.mlflow, pytest.mark.xdist_group("end to end")]

BETA = ("--set", "stages.dpo.with.loss.beta=0.25")
AFTER_DPO = ("dpo", "eval", "gate", "promote")


@dataclass(frozen=True)
class Story:
    """One directory, and what was done in it in turn."""

    product: Product
    first: Done
    again: Done
    runs_after_again: int
    plan: dict[str, Any]
    changed: Done
    nodes: dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    product = Product.tiny(tmp_path_factory.mktemp("story"))
    first = product.run()
    again = product.run(runner="prefect", PYTHONPROFILEIMPORTTIME="1")
    runs = len(product.runs)
    plan = product("plan", "tiny.yaml", *BETA, "--json").json()
    changed = product.run(*BETA)
    yield Story(product, first, again, runs, plan, changed, product.nodes())
    product("down")


def test_a_run_ends_with_a_table_and_code_0(story: Story) -> None:
    assert story.first.code == 0, story.first.text
    for node in NODES:
        assert re.search(
            rf"^{node} +completed .*(dataset|model|report):[0-9a-f]{{12}}", story.first.out, re.M
        )
    assert story.first.out.rstrip().endswith("completed")
    assert story.first.err == ""


def test_a_second_run_does_nothing(story: Story) -> None:
    assert story.again.code == 0, story.again.text
    assert "nothing to do" in story.again.out
    assert story.runs_after_again == 1
    assert not (story.product.workspace / "services").exists()
    assert [process.cmdline() for process in processes_in(story.product.base, server=True)] == []
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in story.again.err.splitlines()}
    assert "posttrain" in imported
    assert imported.isdisjoint({"mlflow", "prefect", "torch", "transformers", "numpy"})


def test_a_changed_option_is_named_and_reruns_what_follows(story: Story) -> None:
    plan = {node["node"]: node for node in story.plan["nodes"]}
    assert [name for name in NODES if plan[name]["standing"] != "cached"] == list(AFTER_DPO)
    assert plan["dpo"]["standing"] == "stale"
    assert plan["dpo"]["reasons"] == ["with.loss.beta: 0.5 → 0.25"]
    assert plan["dpo"]["origins"]["loss.beta"].startswith("--set")
    assert story.changed.code == 0, story.changed.text
    status = {name: node["status"] for name, node in story.nodes.items()}
    assert status == {name: "completed" if name in AFTER_DPO else "cached" for name in NODES}


def test_explain_reaches_the_data_and_the_base(story: Story) -> None:
    shown = story.product("explain", "promote")
    for name in ("promote", "gate", "eval", "dpo", "pairs", "sft", "base", "task"):
        assert f"made by {name} (" in shown.out
    assert '"rows":200' in shown.out


def test_diff_names_the_option(story: Story) -> None:
    listed = story.product("store", "ls", "--json").json()
    one, other = (row["digest"] for row in listed if row["node"] == "dpo")
    shown = story.product("diff", one[:12], other)
    assert shown.code == 1
    assert shown.out.splitlines()[0] == "with.loss.beta: 0.5 → 0.25"
    runs = story.product("diff", *(record.run for record in story.product.runs))
    assert runs.code == 1
    assert "dpo" in runs.out and "loss.beta" in runs.out
    assert "sft" not in runs.out
    same = story.product("diff", one, one)
    assert (same.code, same.out) == (0, "no difference\n")


def test_status_shows_runs_stages_and_the_alias(story: Story) -> None:
    found = story.product("status", "--json").json()
    assert [run["status"] for run in found["runs"]] == ["completed", "completed"]
    assert found["models"] == [{"name": "tiny", "versions": 2, "aliases": {"champion": 2}}]
    assert found["services"] == []
    assert set(story.nodes) == set(NODES)


def test_the_store_is_sound_and_nothing_of_it_is_superfluous(story: Story) -> None:
    verified = story.product("store", "verify", "--full")
    assert verified.code == 0, verified.text
    report = story.product("store", "gc", "--json").json()
    assert report["dry_run"]
    assert [report[part] for part in ("objects", "keys", "work", "scratch", "runs")] == [[]] * 5
    assert report["kept"] == len(list(story.product.objects.iterdir()))


def test_mlflow_has_each_stage_once_with_every_step(story: Story) -> None:
    tracked = Tracked(story.product.workspace)
    assert tracked.repeated() == []
    first, second = (record.run for record in story.product.runs)
    for run in (first, second):
        found = tracked.runs(run)
        assert set(found) == {"", *NODES}
        assert {status for [(_, status)] in found.values()} == {"FINISHED"}
    [(sft, _)] = tracked.runs(first)["sft"]
    assert tracked.metrics(sft)["loss"] == [1, 2, 3, 4, 5, 6]
    assert steps_of(story.product.events("dpo")) == [1, 2, 3]


def test_nothing_is_written_outside_of_the_workspace(story: Story) -> None:
    beside = {path.name for path in story.product.base.iterdir()}
    assert beside == {"tiny.yaml", ".posttrain", "home"}
    assert list((story.product.base / "home").iterdir()) == []
    assert list((story.product.workspace / "store" / "tmp").iterdir()) == []


def test_the_same_pipeline_elsewhere_gives_the_same_digests(story: Story, tmp_path: Path) -> None:
    other = Product.tiny(tmp_path)
    done = other.run(*BETA, "--only", "pairs", runner="process")
    assert done.code == 0, done.text
    outputs = {name: node["end"]["outputs"] for name, node in story.nodes.items()}
    assert other.digests() == {name: outputs[name] for name in ("task", "base", "sft", "pairs")}
