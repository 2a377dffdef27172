"""`posttrain plan`, `run` and `resume`: what they print, what they start, and how they end."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.cli_runs import WORKSPACE, parsed, run
from helpers.planning import CHAIN, PLUGIN, alone, command, write_pipeline
from helpers.plugins import install, write_distribution

from posttrain.execution.records import find_run, list_runs


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone(tmp_path, monkeypatch, columns=80)


@pytest.fixture
def chain() -> Path:
    return write_pipeline(Path("chain.yaml"), CHAIN)


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
        assert "error: sft.data: this rate is absurd" in told.err
        assert not WORKSPACE.exists()

    def test_what_the_machine_lacks_is_warned_of_and_ends_a_run_before_it_starts(
        self, chain: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        asks = ["--set", "stages.dpo.resources.gpus=64"]
        told = command("plan", chain, *asks)
        assert told.code == 0
        text = " ".join(told.out.split())
        assert "this node asks for more GPUs than this machine has: 64, and there are 0" in text
        told = command("run", chain, *asks)
        assert told.code == 2 and "dpo.resources.gpus" in told.err
        assert not WORKSPACE.exists(), "nothing was started"
        assert command("run", chain).code == 0
        assert command("run", chain, *asks).code == 0, "what is cached needs no GPU"
        assert "resources.gpus" not in command("plan", chain, *asks).out

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
