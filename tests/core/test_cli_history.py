"""`posttrain status`, `explain`, `diff` and `store`: what was done, read back from the records."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from helpers.planning import CHAIN, Told, alone, command, write_pipeline

from posttrain.artifacts.aliases import Aliases
from posttrain.execution.processes import alive, start_time
from posttrain.execution.records import find_run, list_runs

WORKSPACE = Path(".posttrain")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone(tmp_path, monkeypatch)


@pytest.fixture
def chain() -> Path:
    return write_pipeline(Path("chain.yaml"), CHAIN)


def run(pipeline: Path, *arguments: str) -> dict[str, Any]:
    told = command("run", pipeline, "--runner", "inline", "--json", *arguments)
    found: dict[str, Any] = json.loads(told.out)
    return found


def parsed(told: Told) -> Any:
    assert told.err == ""
    return json.loads(told.out)


class TestStatus:
    def test_of_an_empty_place(self) -> None:
        told = command("status")
        assert (told.code, told.out) == (0, "no runs yet: `posttrain run quickstart` starts one\n")
        assert parsed(command("status", "--json")) == {"runs": [], "models": [], "services": []}
        assert not WORKSPACE.exists()

    def test_lists_runs_and_shows_one(self, chain: Path) -> None:
        report = run(chain)
        told = command("status")
        (row,) = [line for line in told.out.splitlines() if line.startswith(report["run"])]
        assert row.split()[1:4] == ["chain", "completed", "inline"] and row.split()[-1] == "4/4"
        told = command("status", report["run"][-6:])
        assert any(line.split()[:2] == ["sft", "completed"] for line in told.out.splitlines())
        assert "loss=0.1235" in told.out
        (shown,) = parsed(command("status", report["run"], "--json"))["runs"]
        assert [node["node"] for node in shown["nodes"]] == ["chats", "sft", "dpo", "eval"]
        assert shown["nodes"][1]["end"]["figures"]["loss"] == 0.123456789

    def test_says_how_to_go_on(self, chain: Path) -> None:
        told = command("run", chain, "--runner", "process", "--set", "stages.sft.with.fail=no way")
        assert told.code == 1
        told = command("status")
        name = find_run(WORKSPACE).run
        assert f"go on with `posttrain resume {name}`" in told.out
        shown = command("status", name).out
        assert shown.count("no way") == 1
        assert "skipped" in shown

    def test_suggests_no_run_that_a_later_one_of_its_pipeline_made_up_for(self, chain: Path) -> None:
        command("run", chain, "--runner", "process", "--set", "stages.sft.with.fail=no way")
        unfinished = find_run(WORKSPACE).run
        run(write_pipeline(Path("other.yaml"), CHAIN))
        assert f"go on with `posttrain resume {unfinished}`" in command("status").out
        run(chain, "--set", "stages.sft.with.seed=3")
        assert "go on with" not in command("status").out

    def test_a_damaged_run_hides_no_other(self, chain: Path) -> None:
        first, second = run(chain)["run"], run(chain, "--set", "stages.sft.with.seed=3")["run"]
        (WORKSPACE / "runs" / first / "journal.jsonl").write_text("{}\n{}\n")
        told = command("status")
        assert told.code == 0
        rows = {line.split()[0]: line.split()[1:] for line in told.out.splitlines() if line.strip()}
        assert rows[first][0] == "damaged" and rows[second][:2] == ["chain", "completed"]
        assert f"warning: run {first}: " in told.err and "this journal is damaged" in told.err
        shown = parsed(command("status", "--json"))["runs"]
        assert [each["status"] for each in shown] == ["damaged", "completed"]
        assert "this journal is damaged" in shown[0]["damage"]["message"]

    def test_of_an_unknown_run_is_an_error(self, chain: Path) -> None:
        run(chain)
        told = command("status", "nosuch")
        assert told.code == 2 and told.err.startswith("error: ") and "Traceback" not in told.err

    def test_lists_models_with_their_aliases(self, chain: Path) -> None:
        report = run(chain)
        (digest,) = report["nodes"][1]["outputs"].values()
        version = Aliases(WORKSPACE).register("pirate", digest, report["run"], "sft", {})
        Aliases(WORKSPACE).set_alias("pirate", "champion", version, None)
        assert "model pirate: champion → version 1" in command("status").out
        assert parsed(command("status", "--json"))["models"] == [
            {"name": "pirate", "versions": 1, "aliases": {"champion": 1}}
        ]

    def test_lists_servers_that_are_still_the_ones_that_were_started(self) -> None:
        services = WORKSPACE / "services"
        services.mkdir(parents=True)
        started = start_time(os.getpid())
        assert started is not None
        for name, pid, at in (("here", os.getpid(), started), ("reused", os.getpid(), started - 1000)):
            record = {"name": name, "url": f"http://127.0.0.1/{name}", "pid": pid, "started": at}
            (services / f"{name}.json").write_text(json.dumps(record))
        (found,) = parsed(command("status", "--json"))["services"]
        assert (found["name"], found["pid"]) == ("here", os.getpid())
        assert "server here: http://127.0.0.1/here" in command("status").out
        (services / "here.json").write_text("{}")
        told = command("status")
        assert told.code == 1 and "this service record is damaged" in told.err


def test_a_process_is_known_by_its_start() -> None:
    process = subprocess.Popen(["sleep", "60"])
    started = start_time(process.pid)
    assert started is not None and alive(process.pid, started)
    assert not alive(process.pid, started - 60)
    process.kill()
    process.wait()
    assert start_time(process.pid) is None and not alive(process.pid, started)


class TestExplain:
    def test_leads_from_a_stage_back_to_its_data(self) -> None:
        Path("rows.txt").write_text("sea")
        file = write_pipeline(
            Path("p.yaml"), CHAIN.replace("{uses: try/rows}", "{uses: try/rows, with: {path: rows.txt}}")
        )
        report = run(file)
        told = command("explain", "dpo")
        lines = told.out.splitlines()
        assert lines[0].endswith(f"made by dpo (try/train), run {report['run']}")
        assert f"source: {Path('rows.txt').absolute()}  sha256 " in told.out
        assert "  model: model:" in told.out
        (tree,) = parsed(command("explain", "dpo", "--json"))
        assert {parent["port"] for parent in tree["parents"]} == {"data", "model"}
        assert command("explain", tree["artifact"][:10]).out == told.out

    def test_shows_all_nodes_of_a_stage(self) -> None:
        text = "stages:\n  a: {uses: try/rows, matrix: {rows: [1, 2]}}\n"
        run(write_pipeline(Path("p.yaml"), text))
        assert len(parsed(command("explain", "a", "--json"))) == 4

    @pytest.mark.parametrize("what", ["dpoo", "nosuch", "beef" * 8])
    def test_of_nothing_is_an_error(self, chain: Path, what: str) -> None:
        run(chain)
        told = command("explain", what)
        assert (told.code, told.out) == (2, "")
        assert "Traceback" not in told.err
        if what == "dpoo":
            assert "one of chats, dpo, eval, sft" in told.err and "did you mean `dpo`?" in told.err
            assert "a run" not in told.err

    def test_of_a_run_says_how_to_see_one_and_its_stages(self, chain: Path) -> None:
        name = run(chain)["run"]
        for what in (name, name[-6:]):
            told = command("explain", what)
            assert told.code == 2 and "this is a run, not a stage or an artifact" in told.err
            assert f"`posttrain status {name}`" in told.err
        first = command("explain", f"{name}:sft").out
        assert first == command("explain", "sft").out
        assert run(chain, "--set", "stages.sft.with.loss.beta=0.2")["run"] != name
        assert command("explain", f"{name}:sft.model").out == first != command("explain", "sft").out

    def test_of_an_alias_and_of_a_port(self, chain: Path) -> None:
        report = run(chain)
        (digest,) = report["nodes"][1]["outputs"].values()
        version = Aliases(WORKSPACE).register("pirate", digest, report["run"], "sft", {})
        Aliases(WORKSPACE).set_alias("pirate", "champion", version, None)
        shown = command("explain", "sft").out
        assert command("explain", "pirate@champion").out == command("explain", "sft.model").out == shown
        assert command("diff", "pirate@champion", "sft").code == 0
        told = command("explain", "pirate@nobody")
        assert told.code == 2 and "there is no such alias" in told.err and "pirate@champion" in told.err

    def test_of_a_damaged_artifact_is_no_wrong_argument(self, chain: Path) -> None:
        (digest,) = run(chain)["nodes"][1]["outputs"].values()
        content = WORKSPACE / "store" / "objects" / digest / "content.json"
        content.chmod(0o644)
        content.write_text("{")
        assert command("explain", digest[:10]).code == 1


class TestDiff:
    def test_of_two_runs(self, chain: Path) -> None:
        first = run(chain)["run"]
        second = run(chain, "--set", "stages.sft.with.loss.beta=0.2")["run"]
        told = command("diff", first, second)
        assert told.code == 1
        lines = told.out.splitlines()
        assert lines[0] == "sft: with.loss.beta: 0.1 → 0.2"
        assert any(line.startswith("sft.model: ") for line in lines)
        assert parsed(command("diff", first, second, "--json")) == lines
        assert command("diff", first, first).out == "no difference\n"

    def test_of_two_stages_and_of_two_artifacts(self, chain: Path) -> None:
        report = run(chain)
        told = command("diff", "sft", "dpo")
        assert told.code == 1 and "input model: (none) → " in told.out
        digests = [next(iter(node["outputs"].values()))[:8] for node in report["nodes"][1:3]]
        assert command("diff", *digests).out == told.out
        told = command("diff", "chats", "sft")
        assert "train: only in the first" in told.out and "model: only in the second" in told.out
        assert command("diff", "sft", "sft").code == 0

    def test_of_unlike_things_is_an_error(self, chain: Path) -> None:
        name = run(chain)["run"]
        told = command("diff", name, "sft")
        assert told.code == 2 and "a run can only be compared with a run" in told.err
        told = command("diff", "nosuch", "sft")
        assert told.code == 2 and "a run, the start of a digest" in told.err


class TestStore:
    def test_lists_and_verifies(self, chain: Path) -> None:
        run(chain)
        rows = parsed(command("store", "ls", "--json"))
        assert {row["node"] for row in rows} == {"chats", "sft", "dpo", "eval"}
        told = command("store", "ls")
        assert f"{rows[0]['kind']}:{rows[0]['digest'][:12]}" in told.out
        assert parsed(command("store", "verify", "--json")) == {"artifacts": len(rows), "damaged": {}}
        directory = WORKSPACE / "store" / "objects" / rows[0]["digest"]
        (file,) = directory.glob("rows.txt")
        file.chmod(0o644)
        file.write_text("something else")
        told = command("store", "verify", "--full")
        assert told.code == 1
        assert f"{len(rows)} artifacts, 1 damaged" in told.out and rows[0]["digest"][:12] in told.out

    def test_collects_only_when_told_to(self, chain: Path) -> None:
        run(chain)
        run(chain, "--set", "stages.chats.with.rows=3")
        first = list_runs(WORKSPACE)[0].run
        before = len(parsed(command("store", "ls", "--json")))
        told = command("store", "gc", "--drop-run", first)
        assert told.code == 0 and "would remove" in told.out and "add --delete to do it" in told.out
        assert len(parsed(command("store", "ls", "--json"))) == before
        assert command("store", "gc", "--drop-run", first, "--delete").code == 0
        assert len(parsed(command("store", "ls", "--json"))) == before // 2
        assert [record.run for record in list_runs(WORKSPACE)] != [first]

    def test_of_an_empty_place(self) -> None:
        assert parsed(command("store", "ls", "--json")) == []
        assert command("store", "gc").code == 0
