"""The views of a run: a table redrawn in place, plain lines elsewhere, nothing for machines; and the final table."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from posttrain.cli import live, output, reportview
from posttrain.cli.live import LiveView, PlainView, Silent, view
from posttrain.cli.measures import amount, duration, figures
from posttrain.cli.output import Voice
from posttrain.contracts.runner import NodeResult, NodeStatus
from posttrain.errors import StageError
from posttrain.execution.session import RunReport
from posttrain.wording import size


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(live, "time", clock)
    return clock


def started(node: str = "sft") -> dict[str, Any]:
    return {"type": "node-started", "node": node, "uses": "train.sft"}


def progress(done: int, total: int | None = 100) -> dict[str, Any]:
    return {"type": "progress", "node": "sft", "done": done, "total": total, "unit": "steps"}


def ended(status: str = "completed", summary: str = "", **figures: float) -> dict[str, Any]:
    return {
        "type": "node-ended", "node": "sft", "status": status, "seconds": 61.0, "figures": figures,
        "summary": summary,
    }  # fmt: skip


METRICS = {
    "type": "metrics",
    "node": "sft",
    "step": 3,
    "values": {"loss": 1.23456, "tokens_per_second": 4321.9},
}


def rendered(live: LiveView, width: int = 100) -> list[str]:
    text = io.StringIO()
    Console(file=text, width=width, markup=False).print(live.table())
    return [line.rstrip() for line in text.getvalue().splitlines()]


def test_the_table_shows_progress_loss_speed_and_time_left(clock: Clock) -> None:
    shown = LiveView(["sft", "dpo[seed=1]"])
    assert rendered(shown) == ["sft          pending", "dpo[seed=1]  pending"]
    shown.observe(started())
    shown.observe(progress(10))
    clock.now += 5
    shown.observe(progress(35))
    shown.observe(METRICS)
    line = rendered(shown)[0]
    assert line.startswith("sft          running")
    assert line.endswith("5.0 s  loss 1.235  4322 tokens/s  13.0 s left")
    assert "━" in line
    shown.observe(ended(loss=0.5, accuracy=1))
    assert rendered(shown)[0].split() == ["sft", "completed", "1:01", "loss=0.5", "accuracy=1"]


def test_a_node_of_a_resumed_run_appears_when_it_comes_up(clock: Clock) -> None:
    shown = LiveView([])
    shown.observe(started("new\x1b[2J"))
    assert rendered(shown)[0].startswith("new[2J  running")


def test_the_table_is_drawn_and_notes_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    terminal = Console(file=text, width=80, force_terminal=True, markup=False, highlight=False)
    monkeypatch.setattr(live, "console", lambda: terminal)
    shown = LiveView(["sft"])
    with shown.shown():
        shown.observe(started())
        shown.observe({"type": "note", "node": "sft", "message": "mind [this]\x07"})
        shown.observe({"type": "note", "message": "of the run"})
    drawn = text.getvalue()
    assert drawn.count("note: sft: mind [this]") == 1 and drawn.count("note: of the run") == 1
    assert "running" in drawn and "\x07" not in drawn


def test_plain_lines_tell_each_thing_once(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    shown = PlainView()
    events = [started(), progress(1), METRICS]
    for event in events:
        shown.observe(event)
    clock.now += 11
    shown.observe(progress(2))
    shown.observe(progress(3))
    clock.now += 11
    shown.observe(progress(13, None))
    shown.observe({"type": "note", "node": "sft", "message": "mind this\x1b[0m"})
    shown.observe({"type": "note", "message": "of the run"})
    shown.observe({"type": "run-started"})
    shown.observe(ended(loss=0.25))
    assert capsys.readouterr().out.splitlines() == [
        "sft: started (train.sft)",
        "sft: 2/100 steps  loss 1.235  4322 tokens/s  17:58 left",
        "sft: 13/? steps  loss 1.235  4322 tokens/s",
        "note: sft: mind this[0m",
        "note: of the run",
        "sft: completed in 1:01  loss=0.25",
    ]


def test_every_view_tells_notes_in_the_words_it_is_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A verb with words of its own hands them to whatever shows its run."""
    text = io.StringIO()
    monkeypatch.setattr(live, "console", lambda: Console(file=text))
    voice = output.Voice(word=lambda said: said.replace("with.beta", "--beta"))
    note = {"type": "note", "node": "train", "message": "with.beta is small"}
    for shown in (PlainView(voice), LiveView(["train"], voice)):
        shown.observe(note)
    assert capsys.readouterr().out == "note: train: --beta is small\n" == text.getvalue()


def test_warnings_are_called_so_and_kept_for_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    warning = {"type": "note", "node": "sft", "level": "warning", "message": "3 row(s) lose `tools`"}
    note = {"type": "note", "level": "note", "message": "of the run"}
    plain, silent, drawn = PlainView(), Silent(), LiveView(["sft"])
    for shown in (plain, silent):
        for event in (warning, note, warning, ended()):
            shown.observe(event)
        assert shown.warnings == ["sft: 3 row(s) lose `tools`"]
    said = capsys.readouterr().out.splitlines()
    assert said[:3] == ["warning: sft: 3 row(s) lose `tools`", "note: of the run", said[0]]
    monkeypatch.setattr(live, "console", lambda: Console(file=io.StringIO()))
    drawn.observe(warning)
    assert drawn.warnings == plain.warnings
    report = RunReport("r1", "completed", {"sft": NodeResult("sft", NodeStatus.COMPLETED)})
    reportview.show_report(report, tmp_path, [f"sft: odd {n}" for n in range(12)])
    told = capsys.readouterr().out
    assert "12 warnings" in told and "warning: sft: odd 9" in told and "and 2 more above" in told
    assert "odd 10" not in told
    reportview.show_report(report, tmp_path)
    assert "warning" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "again"),
    [("DataError", "run"), ("SpecError", "run"), ("TrainingDiverged", "run"), ("ValueError", "resume")],
)
def test_what_data_or_options_broke_is_not_to_be_resumed(
    kind: str, again: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = NodeResult("sft", NodeStatus.FAILED, summary="bad", error={"type": kind, "message": "bad"})
    skipped = NodeResult("dpo", NodeStatus.SKIPPED)
    report = RunReport("r1", "failed", {"sft": failed, "dpo": skipped})
    reportview.show_report(report, tmp_path)
    told = capsys.readouterr().out
    assert ("posttrain resume r1" in told) is (again == "resume")
    assert ("`posttrain run` again" in told) is (again == "run")
    with pytest.raises(StageError) as caught:
        report.require_completed()
    assert ("resume" in str(caught.value.fix)) is (again == "resume")


def test_a_verb_says_in_its_own_words_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped = RunReport("r1", "interrupted", {"sft": NodeResult("sft", NodeStatus.INTERRUPTED)})
    voice = Voice(lambda text: text.replace("`posttrain resume r1`", "it"))
    reportview.show_report(stopped, tmp_path, voice=voice)
    assert "run r1: interrupted (go on with it)" in capsys.readouterr().out


@pytest.mark.parametrize("status", [NodeStatus.INCONCLUSIVE, NodeStatus.REJECTED])
def test_a_verdict_that_does_not_let_pass_gives_its_reasons(
    status: NodeStatus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = "0.400 → 0.420: +0.020 [-0.019, 0.058], n=100"
    judged = NodeResult("gate", status, summary=reason, figures={"improvement": 0.02})
    reportview.show_report(RunReport("r1", "inconclusive", {"gate": judged}), tmp_path)
    assert f"gate: {reason}" in capsys.readouterr().out


def test_the_text_of_a_failure_waits_for_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    shown = PlainView()
    shown.observe(ended("failed", "it broke"))
    shown.observe(ended("skipped", "needs dpo (failed)"))
    assert capsys.readouterr().out.splitlines() == [
        "sft: failed in 1:01",
        "sft: skipped in 1:01  needs dpo (failed)",
    ]


def test_the_view_fits_where_the_output_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    with view(["a"], quiet=True) as quiet, view(["a"], quiet=False) as plain:
        assert isinstance(quiet, Silent) and isinstance(plain, PlainView)
        quiet.observe(started())
    terminal = Console(file=io.StringIO(), force_terminal=True)
    monkeypatch.setattr(live, "console", lambda: terminal)
    monkeypatch.setattr(live.sys, "stdout", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})())
    with view(["a"], quiet=False) as live_view:
        assert isinstance(live_view, LiveView)


def test_the_report_fits_80_columns_and_tells_errors_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    output.console.cache_clear()
    many = {f"figure_{n}": 0.123456 for n in range(9)}
    error = {
        "type": "ValueError",
        "message": "ValueError: bad\x1b[31m",
        "where": "file.py:3",
        "log": "loading",
    }
    results = {
        "sft": NodeResult("sft", NodeStatus.COMPLETED, figures=many, seconds=3700),
        "dpo[seed=1]": NodeResult("dpo[seed=1]", NodeStatus.FAILED, summary="ValueError: bad", error=error),
        "eval": NodeResult("eval", NodeStatus.SKIPPED, summary="needs dpo[seed=1] (failed)"),
    }
    reportview.show_report(RunReport("r1", "failed", results), tmp_path)
    told = capsys.readouterr().out
    assert all(len(line) <= 80 for line in told.splitlines())
    assert "1:01:40" in told and "figure_3=0.1235" in told and "figure_4" not in told
    assert told.count("bad") == 1
    assert "  log: loading" in told and "  where: file.py:3" in told
    assert told.rstrip().endswith("run r1: failed (go on with `posttrain resume r1`)")


def test_the_log_of_a_worker_that_died_is_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    error = {"message": "the worker was killed by SIGKILL", "log": "a\nTraceback (most recent call last):\nX"}
    results = {"sft": NodeResult("sft", NodeStatus.FAILED, error=error)}
    reportview.show_report(RunReport("r1", "failed", results), tmp_path)
    assert "  log: Traceback" in capsys.readouterr().out


def test_measures() -> None:
    assert [duration(each) for each in (0.04, 59.94, 60, 3661)] == ["0.0 s", "59.9 s", "1:00", "1:01:01"]
    assert [size(each) for each in (0, 1023, 1024, 3 * 2**20, 2**50)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "3.0 MiB",
        "1024.0 TiB",
    ]
    assert [amount(each) for each in (999, 1500, 2_000_000, 7_615_616_512)] == [
        "999",
        "1.5 k",
        "2 M",
        "7.62 G",
    ]
    assert figures({"a": 1.0, "b": 0.123456, "c": 1e-9, "d": 3, "e": 5}) == "a=1  b=0.1235  c=1e-09  d=3"
    assert figures({}) == ""


def test_printable_strips_what_steers_a_terminal() -> None:
    assert output.printable("a\x1b]0;t\x07\x9b\u202eb\tc\nd\ud800é→") == "a]0;tb\tc\ndé→"
