"""The first differences between artifacts and runs, and where an artifact comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.stores import write

from posttrain.artifacts.kinds import DatasetFacts, Kind, ReportFacts
from posttrain.artifacts.lineage import ancestry
from posttrain.artifacts.manifest import Artifact, Provenance
from posttrain.artifacts.store import KeyRecord, Store
from posttrain.planning.comparison import compare_artifacts, compare_records


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / ".posttrain")


def artifact(
    store: Store,
    payload: dict[str, bytes],
    kind: Kind = Kind.DATASET,
    facts: Any = None,
    **made: Any,
) -> Artifact:
    directory = write(store.scratch("made"), payload)
    store.seal(directory, kind, facts or DatasetFacts(format="text", rows=1))
    parts: dict[str, Any] = {
        "stage": "data.load", "node": "load", "port": "data", "key": "k", "run": "r1", "parents": {},
        "created": "2025-01-02T03:04:05Z", **made,
    }  # fmt: skip
    return store.commit(directory, Provenance(**parts))


def record(**parts: Any) -> KeyRecord:
    given: dict[str, Any] = {
        "key": "k", "uses": "try/train", "node": "sft", "run": "r", "ingredients": {}, "outputs": {},
        "status": "completed", "figures": {}, "summary": "", "seconds": 1.0, "versions": {},
        "device": None, "threads": None, "created": "2025", **parts,
    }  # fmt: skip
    return KeyRecord(**given)


def test_an_artifact_equals_itself(store: Store) -> None:
    one = artifact(store, {"rows.jsonl": b"{}\n"})
    assert compare_artifacts(store, one, one) == []


def test_options_sources_inputs_versions_and_lines_that_differ(store: Store) -> None:
    one = artifact(
        store,
        {"chat_template.jinja": b"a\nb\nc\n", "w.bin": b"\0", "same.txt": b"same", "left.txt": b"l"},
        config={"loss": {"name": "sigmoid", "beta": 0.1}},
        sources={"path": "a" * 64},
        parents={"data": ("b" * 64,)},
        versions={"torch": "2.0"},
    )
    other = artifact(
        store,
        {"chat_template.jinja": b"a\nX\nc\n", "w.bin": b"\1", "same.txt": b"same"},
        facts=DatasetFacts(format="text", rows=2),
        stage="data.other",
        config={"loss": {"name": "sigmoid", "beta": 0.2}, "seed": None},
        sources={"path": "c" * 64},
        parents={},
        versions={"torch": "2.1"},
    )
    found = compare_artifacts(store, one, other)
    assert found[:8] == [
        "facts.rows: 1 → 2",
        "stage: data.load → data.other",
        "with.loss.beta: 0.1 → 0.2",
        "with.seed: (absent) → null",
        "the content of with.path: aaaaaaaaaaaa → cccccccccccc",
        "input data: bbbbbbbbbbbb → (none)",
        "version of torch: 2.0 → 2.1",
        found[7],
    ]
    assert found[7].startswith("file chat_template.jinja: ")
    assert found[8:11] == ["    @@ -2 +2 @@", "    -b", "    +X"]
    assert found[11] == "file left.txt: only in the first"
    assert found[12].startswith("file w.bin: ")
    assert len(found) == 13


def test_artifacts_of_different_kinds(store: Store) -> None:
    one = artifact(store, {"a.txt": b"a"})
    other = artifact(store, {"a.txt": b"a"}, Kind.REPORT, ReportFacts(report="verdict"))
    assert compare_artifacts(store, one, other)[:2] == [
        "kind: dataset → report",
        "facts.type: dataset → report",
    ]


def test_runs_are_compared_node_by_node() -> None:
    before = {
        "sft": record(
            ingredients={"config": {"loss": {"beta": 0.1}}, "inputs": {}},
            outputs={"model": "a" * 64},
            figures={"loss": 0.5, "accuracy": 1.0},
        ),
        "old": record(node="old"),
        "same": record(node="same"),
    }
    after = {
        "sft": record(
            ingredients={"config": {"loss": {"beta": 0.2}}, "inputs": {}},
            outputs={"model": "b" * 64, "log": "c" * 64},
            figures={"loss": 0.25, "accuracy": 1.0},
        ),
        "same": record(node="same"),
        "fresh": record(node="fresh"),
    }
    assert compare_records(before, after) == [
        "sft: with.loss.beta: 0.1 → 0.2",
        "sft.model: aaaaaaaaaaaa → bbbbbbbbbbbb",
        "sft.log: absent → cccccccccccc",
        "sft: loss 0.5 → 0.25",
        "old: only in the first",
        "fresh: only in the second",
    ]


class TestLineage:
    def test_leads_back_to_files_and_options(self, store: Store) -> None:
        rows = artifact(
            store,
            {"a": b"1"},
            config={"path": "/data/chats.jsonl", "limit": None},
            sources={"path": "d" * 64},
        )
        lost = "f" * 64
        model = artifact(
            store,
            {"a": b"2"},
            stage="train.sft",
            node="sft",
            config={"seed": 0},
            parents={"data": (rows.digest, rows.digest), "model": (lost,)},
        )
        tree = ancestry(store, model.digest)
        assert list(tree.lines()) == [
            f"{model.ref}  made by sft (train.sft), run r1",
            f"  data: {rows.ref}  made by load (data.load), run r1",
            "    source: /data/chats.jsonl  sha256 dddddddddddd",
            '    with: {"path":"/data/chats.jsonl"}',
            f"  data: {rows.ref}  made by load (data.load), run r1  (see above)",
            "  model: ffffffffffff  (no longer in the store)",
        ]
        told = tree.as_dict()
        assert [parent["artifact"] for parent in told["parents"]] == [rows.digest] * 2
        assert told["lost"] == [{"port": "model", "artifact": lost}]

    def test_finds_a_source_deep_in_the_options(self, store: Store) -> None:
        config = {"rewards": [{"name": "judge", "rubric": "/r.md"}]}
        sources = {"rewards.0.rubric": "a" * 64, "gone.path": "b" * 64}
        made = artifact(store, {"a": b"1"}, config=config, sources=sources)
        lines = list(ancestry(store, made.digest).lines())
        assert set(lines[1:3]) == {
            "  source: /r.md  sha256 aaaaaaaaaaaa",
            "  source: gone.path  sha256 bbbbbbbbbbbb",
        }
