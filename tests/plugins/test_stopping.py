"""Long work in stages tells how far it is, and ends between two parts of it where a stop was asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.contexts import FakeContext, catalogue, configured
from helpers.training import dataset_artifact

import posttrain_plugins
from posttrain.contracts.registration import load_target
from posttrain.errors import Interrupted
from posttrain_plugins.stopping import pauses

ROWS = [{"prompt": f"q{i}", "completion": f"a{i}"} for i in range(5)]
INPUTS = {
    "data.dedup": ("data",),
    "data.validate": ("data",),
    "data.contamination": ("train", "evaluation"),
}
ALONE = {
    "stopping.py": 1,
    "training/reference_source.py": 1,  # a reference that moves: all ranks stop at once
    "training/watch.py": 2,  # the loop stops at the end of a step, all ranks at once
}
"""How often modules tell of progress without hearing whether to stop."""


def stage_context(directory: Path, uses: str, stop: bool) -> FakeContext:
    stage = catalogue().stage(uses)
    inputs = {
        port: [
            dataset_artifact(
                directory / port, ROWS if port != "evaluation" else ROWS[:1], "prompt_completion"
            )
        ]
        for port in INPUTS[uses]
    }
    made = FakeContext(directory, stage, configured(stage), inputs)
    made.stop = stop
    return made


def test_a_pause_tells_and_ends(tmp_path: Path):
    made = FakeContext(tmp_path, None, None, {})
    pause = pauses(made, "rows", "counting")
    pause(1, 3)
    pause(2, None)
    assert made.seen_progress == [(1, 3, "rows"), (2, None, "rows")]
    made.stop = True
    with pytest.raises(Interrupted, match="counting was asked to stop") as caught:
        pause(3, 3)
    assert caught.value.where == "3 of 3 rows" and "resume" in str(caught.value.fix)
    assert made.seen_progress[-1] == (3, 3, "rows")


@pytest.mark.parametrize("uses", INPUTS)
def test_stages_that_read_rows_stop_when_asked(uses: str, tmp_path: Path):
    run: Any = load_target(catalogue().stage(uses).target)
    made = stage_context(tmp_path / "on", uses, stop=False)
    run(made)
    assert made.seen_progress
    with pytest.raises(Interrupted, match="was asked to stop"):
        run(stage_context(tmp_path / "off", uses, stop=True))


@pytest.mark.parametrize("at", [0, 1, 2])
def test_loading_hears_a_stop_in_each_reading_of_the_file(at: int, tmp_path: Path):
    """The file is read to learn its columns, to judge its rows and to write them."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    stage = catalogue().stage("data.load")
    made = FakeContext(tmp_path, stage, configured(stage, path="rows.jsonl"), {})

    def hear(done: int, unit: str) -> None:
        made.stop = len(made.seen_progress) > at

    made.on_progress = hear
    with pytest.raises(Interrupted, match="the loading was asked to stop"):
        load_target(stage.target)(made)
    assert len(made.seen_progress) == at + 1 and not made.described


def test_whoever_tells_of_progress_hears_a_stop():
    root = Path(posttrain_plugins.__file__).parent
    found = {
        str(path.relative_to(root)): count
        for path in sorted(root.rglob("*.py"))
        if (count := path.read_text(encoding="utf-8").count("context.progress("))
    }
    assert found == ALONE
