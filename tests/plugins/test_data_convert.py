from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers.evaluation import dataset
from helpers.stages import configured, run_stage
from typer.testing import CliRunner

from posttrain.artifacts.kinds import DatasetFacts, Kind
from posttrain.cli.app import app
from posttrain.contracts.stage import Certainty, Input, Level
from posttrain.errors import DataError, SpecError
from posttrain.registry.components import ConfigProblems
from posttrain_plugins.commands import sources
from posttrain_plugins.data.convert import Convert
from posttrain_plugins.data.reading import files, jsonl
from posttrain_plugins.data.rows import read_rows

PAIRS = [{"prompt": f"p{n}", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(4)]


def given(format: str, **facts: Any) -> dict[str, list[Input]]:
    return {"data": [Input("load.data", Kind.DATASET, DatasetFacts(format=format, **facts))]}


def test_a_pair_becomes_two_judged_completions(tmp_path: Path) -> None:
    source = dataset(tmp_path / "pairs", PAIRS, "preference")
    run = run_stage(Convert(), tmp_path, {"data": [source]}, to="unpaired_preference")
    rows = read_rows(run.result("data"))
    assert len(rows) == 8
    assert rows[:2] == [
        {"prompt": "p0", "completion": "good 0", "label": True},
        {"prompt": "p0", "completion": "bad 0", "label": False},
    ]
    assert run.described["data"][1].format == "unpaired_preference"
    assert run.outcome is not None
    assert run.outcome.figures == {"rows": 4.0, "made": 8.0, "nothing": 0.0, "invalid": 0.0}


def test_what_is_lost_on_the_way_is_told(tmp_path: Path) -> None:
    asked, answered = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    empty = {"role": "assistant", "content": ""}
    rows = [{"messages": turns} for turns in ([asked, answered], [asked], [asked, empty])]
    source = dataset(tmp_path / "chats", rows, "messages")
    with pytest.raises(
        DataError, match="row 3: it would not suit `prompt_completion`: `completion` has an empty"
    ):
        run_stage(Convert(), tmp_path / "strict", {"data": [source]}, to="prompt_completion")
    run = run_stage(Convert(), tmp_path, {"data": [source]}, to="prompt_completion", skip_invalid=True)
    assert read_rows(run.result("data")) == [{"prompt": [asked], "completion": [answered]}]
    assert run.outcome is not None
    assert run.outcome.summary == (
        "3 messages rows became 1 prompt_completion row (1 gave none, 1 would not have suited it)"
    )


def test_nothing_left_is_an_error(tmp_path: Path) -> None:
    bad = dataset(
        tmp_path / "bad", [{"prompt": "a", "completion": "b", "label": False}], "unpaired_preference"
    )
    with pytest.raises(DataError, match="no `unpaired_preference` row gave a `prompt_completion` row"):
        run_stage(Convert(), tmp_path, {"data": [bad]}, to="prompt_completion")


def test_strings_become_turns_on_demand(tmp_path: Path) -> None:
    source = dataset(tmp_path / "pairs", PAIRS[:1], "preference")
    run = run_stage(Convert(), tmp_path, {"data": [source]}, to="preference", turns=True)
    (row,) = read_rows(run.result("data"))
    assert row["prompt"] == [{"role": "user", "content": "p0"}]
    assert row["chosen"] == [{"role": "assistant", "content": "good 0"}]
    assert run.described["data"][1].conversational is True


def test_the_plan_knows_the_format_and_that_there_is_no_way() -> None:
    stage, config = Convert(), configured(Convert(), to="prompt_completion")
    assert stage.predict(config, given("preference", policy="ab"))["data"].facts == DatasetFacts(
        format="prompt_completion", policy="ab"
    )
    assert list(stage.check(config, given("preference"))) == []
    (finding,) = stage.check(config, given("text"))
    assert (finding.level, finding.certainty) == (Level.ERROR, Certainty.PREDICTED)
    assert "`text` rows do not become `prompt_completion` rows" in finding.message
    with pytest.raises(ConfigProblems):
        configured(Convert(), to="sharegpt")


def test_the_command_reads_foreign_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [{"instruction": "add", "input": "1 2", "output": "3"}]
    Path("alpaca.json").write_text(json.dumps(lines))
    arguments = ["data", "convert", "alpaca.json", "--to", "messages", "--output", "out.jsonl"]
    result = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    assert json.loads(result.stdout)["made"] == 1
    assert json.loads(Path("out.jsonl").read_text()) == {
        "messages": [{"role": "user", "content": "add\n\n1 2"}, {"role": "assistant", "content": "3"}]
    }
    with pytest.raises(DataError, match="there already"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    result = CliRunner().invoke(app, [*arguments, "--overwrite"], catch_exceptions=False)
    assert "1 prompt_completion row became 1 messages row\n" in result.stdout
    with pytest.raises((DataError, SpecError), match="do not become"):
        CliRunner().invoke(
            app, ["data", "convert", "out.jsonl", "--to", "stepwise", "--output", "x"], catch_exceptions=False
        )


def test_the_command_reads_a_row_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Counted(dict[str, Any]):
        alive = most = 0

        def __init__(self, row: Mapping[str, Any]) -> None:
            super().__init__(row)
            Counted.alive += 1
            Counted.most = max(Counted.most, Counted.alive)

        def __del__(self) -> None:
            Counted.alive -= 1

    read = jsonl.read
    monkeypatch.setitem(files._PLAIN, ".jsonl", lambda path: ((at, Counted(row)) for at, row in read(path)))
    rows = tmp_path / "pairs.jsonl"
    rows.write_text("".join(json.dumps(PAIRS[n % 4] | {"id": n}) + "\n" for n in range(200)))
    found = sources.dataset(str(rows), tmp_path)
    assert [len(list(found.read())) for _ in range(2)] == [200, 200]
    assert found.place(7) == "line 8"
    result = CliRunner().invoke(
        app, ["data", "convert", str(rows), "--to", "messages", "--output", str(tmp_path / "out.jsonl")]
    )
    assert result.exit_code == 0, result.output
    assert 0 < Counted.most < 10
