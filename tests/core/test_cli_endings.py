"""The command line where there is nothing to do, something secret, or nobody who reads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.cli_runs import WORKSPACE, parsed, run
from helpers.planning import CHAIN, PLUGIN, Told, alone, command, write_pipeline

from posttrain.execution import arrears
from posttrain.execution.records import find_run, list_runs

CANARY = "canary-93fe21d07b"

TRACKER = """
import posttrain
from pathlib import Path

POSTTRAIN_API = ">=1,<2"


class Tracker:
    def sync(self, workspace, run):
        SYNC

    def behind(self, workspace, run):
        return not (workspace / f"synced-{run}").exists()


@posttrain.hookimpl
def posttrain_trackers():
    return [posttrain.Registration("book", "a tracker", Tracker)]
"""

WORKING = TRACKER.replace("SYNC", '(workspace / f"synced-{run}").write_text("x")')

FAILING = TRACKER.replace("SYNC", 'raise ConnectionError("refused")')


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone(tmp_path, monkeypatch, columns=80)


@pytest.fixture
def chain() -> Path:
    return write_pipeline(Path("chain.yaml"), CHAIN)


class TestNothingToDo:
    def test_creates_no_run_and_starts_nothing(self, chain: Path) -> None:
        run(chain)
        before = sorted(WORKSPACE.rglob("*"))
        told = run(chain)
        assert told.code == 0
        assert told.out.rstrip().endswith("nothing to do")
        assert "cached" in told.out and "loss=0.1235" in told.out
        assert sorted(WORKSPACE.rglob("*")) == before
        assert run(chain, "--quiet").out == "nothing to do\n"

    def test_trackers_are_brought_up_to_date(self) -> None:
        Path("book.py").write_text(WORKING)
        file = write_pipeline(Path("p.yaml"), CHAIN, [PLUGIN, Path("book.py").absolute()])
        assert run(file).code == 0
        synced = WORKSPACE / f"synced-{find_run(WORKSPACE).run}"
        synced.unlink()
        assert run(file).code == 0
        assert synced.exists()

    def test_a_tracker_that_fails_is_a_warning(self) -> None:
        Path("book.py").write_text(FAILING)
        file = write_pipeline(Path("p.yaml"), CHAIN, [PLUGIN, Path("book.py").absolute()])
        told = run(file)
        assert told.code == 0 and told.out.count("refused") == 1
        told = run(file)
        assert told.code == 0
        assert f"warning: book lacks run {find_run(WORKSPACE).run} (ConnectionError: refused)" in told.err
        (note,) = parsed(run(file, "--json"))["notes"]
        assert "posttrain sync" in note

    def test_a_bad_run_keeps_no_other_from_the_trackers(self) -> None:
        picky = """
        if run == sorted(path.name for path in (workspace / "runs").iterdir())[0]:
            raise ValueError(f"{run} is damaged")
        (workspace / f"synced-{run}").write_text("x")"""
        Path("book.py").write_text(TRACKER.replace("        SYNC", picky.strip("\n")))
        file = write_pipeline(Path("p.yaml"), CHAIN, [PLUGIN, Path("book.py").absolute()])
        for seed in range(3):
            assert run(file, "--set", f"stages.sft.with.seed={seed}").code == 0
        first, *others = [record.run for record in list_runs(WORKSPACE)]
        for name in others:
            (WORKSPACE / f"synced-{name}").unlink()
        told = run(file)
        assert told.code == 0
        assert f"warning: book lacks run {first} (ValueError: {first} is damaged)" in told.err
        assert all((WORKSPACE / f"synced-{name}").exists() for name in others)

    def test_what_befalls_all_runs_is_told_once(self) -> None:
        Path("book.py").write_text(FAILING)
        file = write_pipeline(Path("p.yaml"), CHAIN, [PLUGIN, Path("book.py").absolute()])
        for seed in range(3):
            run(file, "--set", f"stages.sft.with.seed={seed}")
        (note,) = parsed(run(file, "--json"))["notes"]
        assert note.startswith("book lacks past runs (ConnectionError: refused)")

    def test_the_newest_runs_alone_are_looked_at(self, monkeypatch: pytest.MonkeyPatch) -> None:
        Path("book.py").write_text(WORKING)
        file = write_pipeline(Path("p.yaml"), CHAIN, [PLUGIN, Path("book.py").absolute()])
        for seed in range(3):
            run(file, "--set", f"stages.sft.with.seed={seed}")
        for path in WORKSPACE.glob("synced-*"):
            path.unlink()
        monkeypatch.setattr(arrears, "NEWEST", 2)
        assert run(file).code == 0
        names = [record.run for record in list_runs(WORKSPACE)]
        assert sorted(path.name for path in WORKSPACE.glob("synced-*")) == [f"synced-{n}" for n in names[1:]]


class TestSecrets:
    def test_a_literal_is_refused_and_not_repeated(self) -> None:
        literal = "hf_" + "Qw8" * 12
        text = CHAIN.replace(
            "inputs: {data: chats.train}}", f"inputs: {{data: chats.train}}, with: {{token: {literal}}}}}"
        )
        file = write_pipeline(Path("p.yaml"), text)
        for arguments in (
            ("plan", file),
            ("run", file, "--json"),
            ("plan", write_pipeline(Path("q.yaml"), CHAIN), "--set", f"stages.sft.with.token={literal}"),
        ):
            told = command(*arguments)
            assert told.code == 2
            assert "looks like a secret" in told.err
            assert literal not in told.out + told.err

    def test_a_reference_is_never_resolved_into_view(
        self, chain: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MY_TOKEN", CANARY)
        sets = ["--set", "stages.sft.with.token=env:MY_TOKEN"]
        shown = [
            command("plan", chain, *sets),
            command("plan", chain, *sets, "--json"),
            run(chain, *sets),
            run(chain, *sets, "--json"),
            command("status"),
            command("status", find_run(WORKSPACE).run, "--json"),
            command("explain", "sft"),
            command("explain", "sft", "--json"),
            command("doctor", "--json"),
        ]
        assert "logged in with" in shown[2].out
        for told in shown:
            assert CANARY not in told.out + told.err
        assert "env:MY_TOKEN" in shown[1].out
        for path in WORKSPACE.rglob("*"):
            assert not path.is_file() or CANARY.encode() not in path.read_bytes(), path


def test_control_characters_are_stripped() -> None:
    text = 'name: "a\\u009b31mb"\nstages:\n  a: {uses: try/rows, matrix: {rows: [1]}}\n'
    file = write_pipeline(Path("p.yaml"), text)
    told = command("plan", file)
    assert told.code == 0
    assert "plan of a31mb" in told.out and "\x9b" not in told.out
    assert "a[rows=1]" in told.out, "brackets are no markup"
    assert "a[rows=1]" in run(file).out


def child(*arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "posttrain", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **options.pop("env", {})},
        **options,
    )


def test_a_reader_that_goes_away_does_not_end_the_run(chain: Path) -> None:
    process = child("run", chain, "--runner", "inline")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    told = Told(process.wait(), "", process.stderr.read())
    process.stderr.close()
    assert (told.code, told.complaints) == (0, "")
    assert run(chain).out.rstrip().endswith("nothing to do")


@pytest.mark.parametrize(
    "verb", [["plan", "chain.yaml"], ["plan", "chain.yaml", "--json"], ["plugins", "list"]]
)
def test_output_nobody_reads_is_no_error(verb: list[str], chain: Path) -> None:
    process = child(*verb)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    told = Told(process.wait(), "", process.stderr.read())
    process.stderr.close()
    assert (told.code, told.complaints) == (0, "")


def test_an_interrupt_ends_with_130(chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("posttrain.pipeline.Pipeline.plan", interrupt)
    told = command("plan", chain)
    assert (told.code, told.complaints) == (130, "error: interrupted\n")
