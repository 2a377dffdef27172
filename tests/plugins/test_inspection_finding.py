from __future__ import annotations

from pathlib import Path

import pytest
from helpers import runs
from helpers.runs import SyntheticRun, sft_and_dpo
from helpers.stores import commit, key_record

from posttrain.artifacts.aliases import Aliases
from posttrain.artifacts.kinds import Kind, PolicyFacts
from posttrain.artifacts.manifest import Artifact
from posttrain.artifacts.store import Store
from posttrain.contracts.runner import NodeStatus
from posttrain.errors import SpecError
from posttrain.execution.records import run_state
from posttrain_plugins.commands.origins import MODELS, brought
from posttrain_plugins.inspection.finding import find, found

DATASET = frozenset({Kind.DATASET})
POLICY = frozenset({Kind.MODEL, Kind.ADAPTER})


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    return tmp_path / ".posttrain"


@pytest.fixture
def made(workspace: Path) -> dict[str, Artifact]:
    store = Store(workspace)
    data = commit(store, {"rows.jsonl": b'{"text":"a"}\n'})
    test = commit(store, {"rows.jsonl": b'{"text":"b"}\n'})
    model = commit(store, {"config.json": b"{}"}, Kind.MODEL, PolicyFacts(context=7), node="sft")
    store.record(key_record("1" * 64, {"data": data.digest, "test": test.digest}))
    store.record(key_record("2" * 64, {"model": model.digest}, node="sft[seed=1]"))
    aliases = Aliases(workspace)
    aliases.set_alias("policy", "champion", aliases.register("policy", model.digest, "r1", "sft", {}), None)
    return {"data": data, "test": test, "model": model}


@pytest.mark.parametrize(
    ("name", "kinds", "meant"),
    [
        ("load.data", DATASET, "data"),
        ("load.test", DATASET, "test"),
        ("sft", POLICY, "model"),
        ("sft.model", POLICY, "model"),
        ("sft[seed=1].model", POLICY, "model"),
        ("policy@champion", POLICY, "model"),
    ],
)
def test_names(
    workspace: Path, made: dict[str, Artifact], name: str, kinds: frozenset[Kind], meant: str
) -> None:
    assert find(name, workspace, kinds) == made[meant]


def test_digests(workspace: Path, made: dict[str, Artifact]) -> None:
    for artifact in made.values():
        assert find(artifact.digest, workspace, frozenset(Kind)) == artifact
        assert find(artifact.ref, workspace, frozenset(Kind)) == artifact


def test_the_newest_output_counts(workspace: Path, made: dict[str, Artifact]) -> None:
    store = Store(workspace)
    newer = commit(store, {"rows.jsonl": b'{"text":"c"}\n'})
    store.record(key_record("3" * 64, {"data": newer.digest}, created="2026-01-02T03:04:05.000+00:00"))
    assert find("load.data", workspace, DATASET) == newer


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("load", "several outputs"),
        ("load.nothing", "neither a file nor a dataset"),
        ("policy@nobody", "no such alias"),
        ("sft.model", "another kind"),
        ("99999999", "neither a file nor a dataset"),
    ],
)
def test_what_is_not_there_is_explained(
    workspace: Path, made: dict[str, Artifact], name: str, message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        find(name, workspace, DATASET)


def test_a_workspace_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="neither a file nor a dataset"):
        find("load.data", tmp_path / "nowhere", DATASET)


def test_the_newest_run_counts_also_where_it_took_the_node_from_the_cache(tmp_path: Path) -> None:
    workspace = tmp_path / ".posttrain"
    digests: dict[str, str] = {}
    for run, pipeline, status in (
        ("20260101-000000-00", "mine", NodeStatus.COMPLETED),
        ("20260102-000000-00", "other", NodeStatus.COMPLETED),
        ("20260103-000000-00", "mine", NodeStatus.CACHED),
    ):
        made = (
            digests.get(pipeline)
            or runs.artifact(workspace, "base", "model", Kind.MODEL, pipeline, run).digest
        )
        digests[pipeline] = made
        if status is NodeStatus.COMPLETED:
            Store(workspace).record(key_record(run[:8] * 8, {"model": made}, node="base", created=run))
        synthetic = SyntheticRun(workspace, run, pipeline)
        synthetic.begin()
        synthetic.end("base", status, outputs={"model": made})
    meant = found("base.model", workspace, POLICY)
    assert meant.artifact.digest == digests["mine"]
    assert meant.origin == "pipeline mine, run 20260103-000000-00"
    for name in ("20260102:base.model", "other:base", "other:base.model"):
        assert found(name, workspace, POLICY).artifact.digest == digests["other"]
    with pytest.raises(SpecError, match="neither a file nor an adapter or model of that name"):
        found("nothing", workspace, POLICY)


def test_a_run_in_which_the_node_did_not_complete_does_not_count(tmp_path: Path) -> None:
    workspace = tmp_path / ".posttrain"
    for run, status in (("20260101-000000-00", "completed"), ("20260102-000000-00", "failed")):
        synthetic = SyntheticRun(workspace, run, "mine")
        synthetic.begin()
        base = runs.artifact(workspace, "base", "model", Kind.MODEL, run, run)
        synthetic.end("base", NodeStatus.COMPLETED, outputs={"model": base.digest})
        if status == "completed":
            trained = runs.artifact(workspace, "sft", "model", Kind.MODEL, "trained", run)
            synthetic.end("sft", status, outputs={"model": trained.digest})
        else:
            synthetic.end("sft", status)
        synthetic.finish(status)
    meant = found("sft", workspace, POLICY)
    assert (meant.artifact, meant.origin) == (trained, "pipeline mine, run 20260101-000000-00")
    meant = found("base", workspace, POLICY)
    assert (meant.artifact, meant.origin) == (base, "pipeline mine, run 20260102-000000-00")
    told = brought("sft", MODELS, workspace, {}, download=False)
    assert told.taken == f"sft is {trained.ref} of pipeline mine, run 20260101-000000-00"
    assert told.stage == {"uses": "store.load", "with": {"path": str(trained.path)}}


def test_an_output_of_one_run(tmp_path: Path) -> None:
    run = sft_and_dpo(tmp_path / ".posttrain")
    state = run_state(run.record)
    for node, kinds in (("data", DATASET), ("sft", POLICY), ("dpo", POLICY)):
        ended = state.nodes[node].ended
        assert ended is not None
        for port, digest in ended.outputs.items():
            assert find(f"{run.run}:{node}.{port}", run.workspace, kinds).digest == digest
