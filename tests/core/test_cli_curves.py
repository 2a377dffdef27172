"""`posttrain curves`: how the metrics of a training went."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.planning import CHAIN, alone, command, write_pipeline
from helpers.runs import SyntheticRun, sft_and_dpo

from posttrain.cli.chart import BLOCKS, plot, sparkline, spread
from posttrain.execution.records import list_runs, run_state


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone(tmp_path, monkeypatch)


@pytest.fixture
def trained() -> SyntheticRun:
    return sft_and_dpo(Path(".posttrain").absolute())


def test_steps_share_a_column_and_columns_without_one_are_between_their_neighbours():
    assert spread({0: 0.0, 4: 8.0}, 5) == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert spread({0: 1.0, 1: 3.0, 9: 5.0, 10: 7.0}, 2) == [2.0, 6.0]
    assert spread({7: 2.5}, 3) == [2.5, 2.5, 2.5]


def test_a_line_of_blocks_goes_from_the_least_to_the_most():
    assert sparkline({1: 0.0, 2: 0.5, 3: 1.0}, 10) == "▁▅█"
    assert sparkline(dict.fromkeys(range(9), 3.0), 4) == "▄▄▄▄"


def test_a_plot_worked_out_by_hand():
    """Four columns of dots and eight rows: 0 → row 0, 1/3 → 2, 2/3 → 5, 1 → 7; a line joins each to the one before."""
    assert plot({0: 0.0, 3: 1.0}, 4, 2) == ["1 ⠀⡼", "0 ⣰⠃", "  0"]


def test_all_metrics_in_a_line_each(trained: SyntheticRun):
    told = command("curves", "sft")
    assert told.code == 0, told.err
    title, head, loss, norm = told.out.splitlines()
    assert title == f"sft in run {trained.record.run}"
    assert head.split() == ["metric", "steps", "first", "last", "least", "most", "curve"]
    assert loss.split() == ["loss", "3", "1", "0.3333", "0.3333", "1", "█▃▁"]
    assert norm.split() == ["grad", "norm", "3", "2", "2", "2", "2", "▄▄▄"]


@pytest.mark.parametrize("columns", [50, 80, 200])
def test_a_curve_has_the_room_that_is_left(
    columns: int, trained: SyntheticRun, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", str(columns))
    told = command("curves", "sft")
    lines = told.out.splitlines()
    names = {line.split()[0] for line in lines[2:]}
    assert {"loss", "grad"} <= names, "one line each, and names are whole"
    assert all(len(line) <= columns for line in lines)
    assert all(line.split()[-1][0] in BLOCKS for line in lines[2:])


def test_one_metric_as_a_plot(trained: SyntheticRun):
    told = command("curves", f"{trained.record.run}:sft", "--metric", "loss")
    lines = told.out.splitlines()
    assert lines[2] == "loss" and len(lines) == 3 + 12 + 1
    assert lines[3].startswith("     1 ") and lines[-2].startswith("0.3333 ")
    assert lines[-1].split() == ["1", "3"]


def test_an_attempt_that_began_anew_counts_from_there_on(trained: SyntheticRun):
    trained.start("sft", attempt=2)
    trained.metrics("sft", 2, attempt=2, loss=0.25)
    trained.metrics("sft", 4, attempt=2, loss=float("nan"))
    found = json.loads(command("curves", "sft", "--json").out)
    assert found["metrics"] == {"loss": [[1, 1.0], [2, 0.25]], "grad norm": [[1, 2.0]]}
    assert (found["run"], found["stage"]) == (trained.record.run, "sft")


def test_a_newer_run_that_told_nothing_yet_is_not_passed_over(trained: SyntheticRun):
    newer = SyntheticRun(Path(".posttrain").absolute(), "r2")
    newer.begin()
    newer.start("sft")
    told = command("curves", "sft")
    assert told.code == 1 and f"sft in run {newer.record.run}" in told.err and "RUN:sft" in told.err
    assert command("curves", f"{trained.record.run}:sft").code == 0


def test_what_is_damaged_is_named(trained: SyntheticRun):
    events = trained.record.stage("sft") / "1" / "events.jsonl"
    events.write_bytes(events.read_bytes() + b'{"type": "met{}\n')
    told = command("curves", "sft")
    assert told.code == 1 and f"{events}:4" in told.err
    events.write_bytes(events.read_bytes().rpartition(b"{")[0])
    assert command("curves", "sft").code == 0, "a last line without its end is still being written"


def test_of_a_cached_stage_those_of_what_built_it():
    pipeline = write_pipeline(Path("chain.yaml"), CHAIN)
    for beta in ("0.1", "0.2"):
        told = command("run", pipeline, "--runner", "inline", "--set", f"stages.dpo.with.loss.beta={beta}")
        assert told.code == 0, told.err
    first, second = (record.run for record in list_runs(Path(".posttrain")))
    found = json.loads(command("curves", f"{second}:sft", "--json").out)
    assert (found["run"], found["metrics"]) == (first, {"loss": [[1, 0.5]]})
    assert json.loads(command("curves", "dpo", "--json").out)["run"] == second


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["stf"], ["no run came to", "one of data, sft, dpo", "did you mean `sft`"]),
        (["9999:sft"], ["there is no such run"]),
        (["sft", "--metric", "lss"], ["no such metric", "one of loss", "did you mean `loss`"]),
    ],
)
def test_what_is_not_there_is_told(trained: SyntheticRun, arguments: list[str], parts: list[str]):
    told = command("curves", *arguments)
    assert told.code == 2
    assert all(part in told.err for part in parts), told.err


def test_a_stage_that_tells_none_is_told(trained: SyntheticRun):
    told = command("curves", "data")
    assert told.code == 1 and "the stage told no metrics" in told.err and "completed" in told.err


def test_names_are_those_of_other_verbs():
    run = SyntheticRun(Path(".posttrain").absolute())
    run.begin()
    for cell in ("dpo[seed=0]", "dpo[seed=1]"):
        run.start(cell)
        run.metrics(cell, 1, loss=0.5)
    pipeline = run_state(run.record).pipeline
    assert command("curves", f"{pipeline}:dpo[seed=1]").code == 0
    told = command("curves", "dpo")
    assert told.code == 2 and "one of dpo[seed=0], dpo[seed=1]" in told.err


def test_before_any_run_there_is_nothing():
    told = command("curves", "sft")
    assert told.code == 2 and "a stage of a run" in told.err
