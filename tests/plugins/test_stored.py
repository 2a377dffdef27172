"""The stage `store.load`: an artifact is put out again as it was, or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.contexts import FakeContext, catalogue, configured
from helpers.stores import commit

from posttrain.artifacts.manifest import Artifact
from posttrain.artifacts.store import Store
from posttrain.errors import StoreError
from posttrain_plugins.stored import run

ROWS = {"rows.jsonl": b"{}\n", "images/one.png": b"pixels"}


def loading(directory: Path, artifact: Artifact) -> FakeContext:
    stage = catalogue().stage("store.load")
    return FakeContext(directory, stage, configured(stage, path=str(artifact.path)), {})


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    found = commit(Store(tmp_path / ".posttrain"), ROWS)
    for path in (found.path, *found.path.rglob("*")):
        path.chmod(0o755)
    return found


def test_its_files_are_put_out_as_they_are(tmp_path: Path, artifact: Artifact) -> None:
    context = loading(tmp_path / "load", artifact)
    run(context)
    out = context.output("artifact")
    assert {
        path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()
    } == ROWS


def test_a_damaged_file_is_refused(tmp_path: Path, artifact: Artifact) -> None:
    (artifact.path / "rows.jsonl").write_bytes(b"{ }\n")
    with pytest.raises(StoreError, match="a file with other content") as error:
        run(loading(tmp_path / "load", artifact))
    assert str(error.value.where).endswith("rows.jsonl")


@pytest.mark.parametrize("path", ["../out.txt", "a/../../out.txt", "/tmp/out.txt"])
def test_a_manifest_cannot_name_a_file_outside(tmp_path: Path, artifact: Artifact, path: str) -> None:
    file = artifact.path / "content.json"
    content = json.loads(file.read_text())
    content["files"][0]["path"] = path
    file.write_text(json.dumps(content))
    with pytest.raises(StoreError, match="the directory is no artifact"):
        run(loading(tmp_path / "load", artifact))
