"""`posttrain plan`, `run` and `resume`: what they print, what they start, and how they end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.planning import CHAIN, PLUGIN, Told, command, write_pipeline
from helpers.plugins import install, write_distribution

from posttrain.execution import arrears
from posttrain.execution.records import find_run, list_runs

WORKSPACE = Path(".posttrain")
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
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POSTTRAIN_DISABLE_PLUGINS", "flows")
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("POSTTRAIN_WORKSPACE", "POSTTRAIN_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def chain() -> Path:
    return write_pipeline(Path("chain.yaml"), CHAIN)


def run(pipeline: Path, *arguments: str) -> Told:
    return command("run", pipeline, "--runner", "inline", *arguments)


def parsed(told: Told) -> Any:
    return json.loads(told.out)


class TestPlan:
    def test_shows_standing_reasons_plugins_and_estimates(self, chain: Path) -> None:
        told = command("plan", chain)
        assert told.code == 0
        lines = told.out.splitlines()
        assert lines[0] == "plan of chain"
        assert lines[1].split() == ["stage", "uses", "standing", "why", "estimate"]
        sft = next(line for line in lines if line.startswith("sft"))
        assert sft.split()[:2] == ["sft", "try/train"] and "new" in sft
        assert "+ try/margin" in told.out
        for part in ("1.5 k parameters", "500 trained", "3.0 MiB", "float32"):
            assert part.split()[0] in told.out
        assert "-m posttrain.execution request.json" in told.out
        assert all(len(line) <= 80 for line in lines if "posttrain.execution" not in line)
        assert not WORKSPACE.exists()

    def test_json_has_it_all(self, chain: Path) -> None:
        told = command("plan", chain, "--set", "stages.sft.with.loss.beta=0.1", "--json")
        assert told.code == 0
        plan = parsed(told)
        sft = next(node for node in plan["nodes"] if node["node"] == "sft")
        assert sft["config"]["loss"]["beta"] == 0.1
        assert sft["origins"]["loss.beta"] == "--set stages.sft.with.loss.beta"
        assert sft["origins"]["learning_rate"] == "default"
        dpo = next(node for node in plan["nodes"] if node["node"] == "dpo")
        assert dpo["origins"]["loss.beta"].startswith(f"{chain}:")
        assert plan["nothing_to_do"] is False

    def test_a_refusal_exits_2_and_says_why_once(self, chain: Path) -> None:
        sets = ["--set", "stages.sft.with.learning_rate=2", "--set", "stages.dpo.with.learning_rate=2"]
        told = command("plan", chain, *sets)
        assert told.code == 2
        text = " ".join(told.out.split())
        assert "error predicted sft.data, dpo.data: this rate is absurd [rate] fix: lower it" in text
        assert text.count("absurd") == 1
        assert parsed(command("plan", chain, *sets, "--json"))["refused"] == 2
        told = run(chain, *sets)
        assert told.code == 2
        assert "error: sft.data: rate: this rate is absurd" in told.err
        assert not WORKSPACE.exists()

    def test_from_without_a_cache_exits_2(self, chain: Path) -> None:
        told = command("plan", chain, "--from", "dpo")
        assert told.code == 2
        assert "not in the cache, though --from needs it: chats, sft" in told.out
        told = run(chain, "--from", "dpo")
        assert told.code == 2 and "--from: these stages come before the selection" in told.err

    def test_a_tiny_plan(self, chain: Path) -> None:
        (sft,) = [
            n for n in parsed(command("plan", chain, "--tiny", "--json"))["nodes"] if n["node"] == "sft"
        ]
        assert (sft["config"]["steps"], sft["origins"]["steps"]) == (2, "--tiny")

    @pytest.mark.parametrize(
        ("line", "where", "message"),
        [
            ("      sft: {uses: try/train, inputs: {data: chats.train}, with: {sed: 1}}", ":5:62", "'sed'"),
            (
                "      sft: {uses: try/train, inputs: {data: chats.train}, with: {loss: {betta: 1}}}",
                ":5:69",
                "'betta'",
            ),
            ("      sft: {uses: try/train, input: {data: chats.train}}", ":5:26", "`input`"),
            (
                "      sft: {uses: try/train, inputs: {data: chats.train}, resources: {cpu: 1}}",
                ":5:67",
                "`cpu`",
            ),
        ],
    )
    def test_an_unknown_key_at_any_depth_exits_2(self, line: str, where: str, message: str) -> None:
        text = f"    stages:\n      chats: {{uses: try/rows}}\n{line}\n"
        file = write_pipeline(Path("p.yaml"), text)
        for verb in ("plan", "run"):
            told = command(verb, file)
            assert told.code == 2
            assert f"error: p.yaml{where}: " in told.err and message in told.err
            assert "did you mean" in told.err
            assert "Traceback" not in told.err
            assert not WORKSPACE.exists()


class TestRun:
    def test_a_run_shows_each_stage_once_and_a_table(self, chain: Path) -> None:
        told = run(chain)
        assert (told.code, told.complaints) == (0, "")
        assert told.out.count("sft: started (try/train)") == 1
        assert "sft: completed in" in told.out
        table = told.out[told.out.index("key figures") :]
        assert "loss=0.1235" in table and "tokens=0.1235" in table
        assert "entropy" not in told.out, "four figures fit"
        assert all(len(line) <= 80 for line in table.splitlines())
        assert f"run {find_run(WORKSPACE).run}: completed" in told.out

    def test_json_is_all_there_is_on_standard_output(self) -> None:
        file = write_pipeline(Path("p.yaml"), "stages:\n  noisy: {uses: try/silent}\n")
        told = run(file, "--json")
        report = parsed(told)
        assert (told.code, report["status"]) == (0, "completed")
        assert report["nodes"][0]["node"] == "noisy"
        assert "pid " in told.err, "what a stage prints in this process"

    def test_quiet_shows_the_table_alone(self, chain: Path) -> None:
        told = run(chain, "--quiet")
        assert "started" not in told.out and "key figures" in told.out

    @pytest.mark.parametrize(("verdict", "code"), [("rejected", 3), ("inconclusive", 4), ("completed", 0)])
    def test_a_verdict_decides_the_exit_code_now_and_later(self, verdict: str, code: int) -> None:
        text = CHAIN + (
            f"      gate: {{uses: try/compare, inputs: {{models: dpo}}, with: {{verdict: {verdict}}}}}\n"
            "      out: {uses: try/publish, inputs: {model: dpo, report: gate}}\n"
        )
        file = write_pipeline(Path("p.yaml"), text)
        assert run(file).code == code
        again = run(file)
        assert (again.code, len(list_runs(WORKSPACE))) == (code, 1)
        assert "nothing to do" in again.out
        assert parsed(run(file, "--json"))["status"] == verdict

    def test_a_failure_is_told_once_and_exits_1(self, chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        told = command(
            "run", chain, "--runner", "process", "--only", "sft", "--set", "stages.sft.with.fail=mind the gap"
        )
        assert told.code == 1
        assert told.out.count("mind the gap") == 1
        assert "ValueError: mind the gap" in told.out and "planning_stages.py:" in told.out
        run_id = find_run(WORKSPACE).run
        assert f"run {run_id}: failed (go on with `posttrain resume {run_id}`)" in told.out
        assert "Traceback" not in told.out + told.err
        told = command("resume", "--runner", "process", "--json")
        report = parsed(told)
        assert (told.code, report["run"], report["status"]) == (1, run_id, "failed")
        assert [node["status"] for node in report["nodes"]] == ["cached", "failed"]

    def test_only_then_all(self, chain: Path) -> None:
        assert "dpo" not in run(chain, "--only", "sft").out
        report = parsed(run(chain, "--json"))
        statuses = [node["status"] for node in report["nodes"]]
        assert statuses == ["cached", "cached", "completed", "completed"]

    def test_an_unknown_runner_exits_2_though_all_is_cached(self, chain: Path) -> None:
        assert run(chain).code == 0
        told = command("run", chain, "--runner", "slurm")
        assert told.code == 2 and "--runner: there is no such runner" in told.err

    def test_what_is_denied_on_purpose_is_no_warning(self, chain: Path) -> None:
        assert command("plan", chain).err == ""
        assert parsed(command("plan", chain, "--json"))["warnings"] == []
        told = command("sync")
        assert told.code == 2 and "denied by POSTTRAIN_DISABLE_PLUGINS" in told.err, (
            "it may be what is missing"
        )

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("raise RuntimeError('no')\n", "import-error: RuntimeError: no"),
            ("x = 1\n", "invalid: POSTTRAIN_API is missing"),
            (None, "import-error: FileNotFoundError"),
        ],
    )
    def test_a_plugin_file_of_the_pipeline_that_cannot_be_used_ends_it(
        self, text: str | None, message: str
    ) -> None:
        if text is not None:
            Path("guard.py").write_text(text)
        file = write_pipeline(Path("p.yaml"), CHAIN, [PLUGIN, Path("guard.py")])
        for told in (command("plan", file), run(file), command("plan", file, "--json")):
            assert told.code == 2
            assert f"error: p.yaml:3:5: this plugin file cannot be used: {message}" in told.err
            assert "Traceback" not in told.err
        assert not WORKSPACE.exists()
        told = command("plugins", "check", "--file", "guard.py")
        assert told.code != 0 and message.partition(": ")[2] in told.out + told.err

    def test_a_name_that_no_file_has_is_refused(self) -> None:
        file = Path("p.yaml")
        file.write_text('plugins: ["a\\0b.py"]\nstages: {a: {uses: x.y}}\n')
        told = command("plan", file)
        assert told.code == 2 and "error: p.yaml:1:11: this cannot be the name of a file" in told.err

    def test_broken_distributions_are_warned_about(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        site = tmp_path / "site"
        site.mkdir()
        write_distribution(site, "bad", "raise RuntimeError('no')\n")
        install(site, monkeypatch)
        file = write_pipeline(Path("p.yaml"), "stages:\n  a: {uses: try/rows}\n")
        for verb in (("plan", file), ("run", file, "--runner", "inline")):
            told = command(*verb)
            assert told.code == 0
            (line,) = [each for each in told.err.splitlines() if "bad" in each]
            assert line.startswith("warning: ") and "RuntimeError: no" in line
        assert any("RuntimeError: no" in each for each in parsed(command("plan", file, "--json"))["warnings"])
        report = parsed(run(file, "--set", "stages.a.with.rows=3", "--json"))
        assert any("RuntimeError: no" in each for each in report["warnings"])

    def test_errors_are_json_too(self, chain: Path) -> None:
        told = run(chain, "--set", "stages.sft.with.sed=1", "--json")
        assert told.code == 2
        error = parsed(told)["error"]
        assert error["where"] == "--set stages.sft.with.sed"
        assert "there is no option 'sed'" in told.err

    def test_a_workspace_that_cannot_be_written_is_explained(self, chain: Path) -> None:
        Path("file").write_text("")
        told = run(chain, "--workspace", "file/inside")
        assert told.code == 1
        assert told.err.startswith("error: ") and "Traceback" not in told.err


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
