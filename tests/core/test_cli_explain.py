"""`posttrain explain` of a stage that has no outputs says so, and why."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.planning import CHAIN, command, write_pipeline

AFTER = "      after: {uses: try/rows, needs: [eval]}\n"


def test_a_skipped_stage_is_explained_by_what_stopped_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POSTTRAIN_DISABLE_PLUGINS", "flows")
    no = CHAIN.replace(
        "inputs: {models: [sft, dpo]}", "inputs: {models: [sft, dpo]}, with: {verdict: rejected}"
    )
    pipeline = write_pipeline(Path("chain.yaml"), no.rstrip() + "\n" + AFTER)
    assert command("run", pipeline, "--runner", "inline", "--json").code == 3
    told = command("explain", "after")
    assert told.code == 1
    assert "after has no outputs yet" in told.err and "skipped: needs eval (rejected)" in told.err
