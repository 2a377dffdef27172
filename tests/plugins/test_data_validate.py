from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.evaluation import dataset
from helpers.stages import configured, run_stage
from typer.testing import CliRunner

from posttrain.artifacts.kinds import ReportFacts
from posttrain.cli.app import app
from posttrain.contracts.stage import Level
from posttrain.errors import DataError
from posttrain.registry.components import ConfigProblems
from posttrain_plugins.data.formats import format_of
from posttrain_plugins.data.judging.checks import CHECKS
from posttrain_plugins.data.judging.validation import Report, inspect, inspect_file
from posttrain_plugins.data.validate import Validate, ValidateConfig, checks_of

Row = dict[str, Any]


def turn(role: str, content: str | None = "x", **more: Any) -> Row:
    return {"role": role, "content": content, **more}


CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def looked_at(rows: list[Row], format: str, **options: Any) -> Report:
    entries = [(f"row {number}", row) for number, row in enumerate(rows, 1)]
    return inspect(entries, format_of(format), format, checks_of(ValidateConfig(**options)))


def found(row: Row, format: str, **options: Any) -> dict[str, str]:
    report = looked_at([row], format, **options)
    return {problem.code: problem.examples[0][1] for problem in report.problems}


def chat(*turns: Row, **columns: Any) -> Row:
    return {"messages": list(turns), **columns}


HEALTHY: list[tuple[str, Row]] = [
    ("text", {"text": "a text", "system": "s"}),
    ("messages", chat(turn("system", "s"), turn("user"), turn("assistant"), system="s")),
    ("prompt_completion", {"prompt": "a", "completion": "b", "system": " "}),
    ("text", {"text": "plain text < 3 | with [brackets]"}),
    ("messages", chat(turn("system"), turn("user"), turn("assistant"), turn("user"), turn("assistant"))),
    (
        "messages",
        chat(
            turn("user"),
            turn("assistant", None, tool_calls=[CALL, CALL]),
            turn("tool"),
            turn("tool"),
            turn("assistant"),
            tools=TOOLS,
        ),
    ),
    ("preference", {"prompt": "a", "chosen": "b", "rejected": "c", "score_chosen": 2, "score_rejected": 1}),
    ("prompt_completion", {"prompt": "a", "completion": [turn("assistant", "שלום 👋🏽")]}),
]


@pytest.mark.parametrize(("format", "row"), HEALTHY)
def test_nothing_is_wrong_with_good_rows(format: str, row: Row) -> None:
    report = looked_at([row], format)
    assert report.problems == ()
    assert report.summary() == f"1 `{format}` row, nothing wrong"


@pytest.mark.parametrize(
    ("format", "row", "code", "told"),
    [
        ("preference", {"prompt": "a", "chosen": "b", "rejected": "b"}, "identical-pair", "the same"),
        (
            "preference",
            {"prompt": "a", "chosen": "b", "rejected": "c", "chosen_reward": 0.1, "rejected_reward": 0.9},
            "inverted-pair",
            "better score",
        ),
        ("messages", chat(turn("user")), "no-answer", "no assistant turn"),
        ("messages", chat(turn("user"), turn("assistant", " ")), "empty-answer", "answer 1 is empty"),
        (
            "messages",
            chat(turn("user"), turn("user"), turn("assistant")),
            "roles",
            "message 2 is the second `user`",
        ),
        (
            "messages",
            chat(turn("user"), turn("system"), turn("assistant")),
            "roles",
            "message 2 is a `system` turn",
        ),
        (
            "messages",
            chat(turn("assistant"), turn("user"), turn("assistant")),
            "roles",
            "begins with the assistant",
        ),
        (
            "messages",
            chat(turn("user"), turn("assistant", None, tool_calls=[CALL]), turn("user"), tools=TOOLS),
            "tool-results",
            "message 3 follows 1 tool call(s)",
        ),
        (
            "messages",
            chat(turn("user"), turn("tool"), turn("assistant")),
            "tool-results",
            "nothing called for",
        ),
        (
            "messages",
            chat(turn("user"), turn("assistant", None, tool_calls=[CALL])),
            "unknown-tool",
            "calls `f`",
        ),
        ("text", {"text": "a <|im_end|> b"}, "control-token", "completion holds '<|im_end|>' at character 3"),
        (
            "prompt",
            {"prompt": [turn("user", "[INST] hi")]},
            "control-token",
            "user holds '[INST]' at character 1",
        ),
        ("text", {"text": "a\x00b"}, "stray-character", "'\\x00' at character 2"),
        ("text", {"text": "caf\ufffd"}, "stray-character", "'\\ufffd' at character 4"),
        ("prompt_completion", {"prompt": "a", "completion": " b"}, "edge-space", "white space"),
        ("preference", {"prompt": "a", "chosen": "b", "rejected": "c", "margin": -1}, "margins", "is -1"),
        ("prompt_completion", {"prompt": "a", "completion": "b", "system": "s"}, "unused-system", "`system`"),
        (
            "messages",
            chat(turn("user"), turn("assistant"), system_prompt="s"),
            "unused-system",
            "`system_prompt`",
        ),
    ],
)
def test_what_is_odd_is_found(format: str, row: Row, code: str, told: str) -> None:
    seen = found(row, format)
    assert told in seen[code]
    assert code not in found(row, format, ignore=(code,))


def test_the_fix_of_an_inverted_pair_swaps_the_scores_too() -> None:
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "score_chosen": 1, "score_rejected": 2}
    (problem,) = looked_at([row], "preference").problems
    swap = "{chosen: rejected, rejected: chosen, score_chosen: score_rejected, score_rejected: score_chosen}"
    assert f"`columns: {swap}`" in str(problem.fix)
    names = dict(pair.split(": ") for pair in swap.strip("{}").split(", "))
    assert looked_at([{names.get(key, key): row[key] for key in row}], "preference").problems == ()


def test_every_check_is_tried_here() -> None:
    marks = test_what_is_odd_is_found.pytestmark[0].args[1]  # type: ignore[attr-defined]
    assert {case[2] for case in marks} == set(CHECKS)


def test_long_rows_and_what_all_rows_show() -> None:
    assert found({"text": "a" * 11}, "text", max_characters=10) == {"too-long": "11 characters"}
    rows = [{"prompt": f"p{n}", "completion": f"c{n}", "label": n > 0} for n in range(20)]
    (unbalanced,) = looked_at(rows, "unpaired_preference").problems
    assert (unbalanced.code, unbalanced.title) == (
        "unbalanced-labels",
        "good and bad completions are 19 to 1",
    )
    (repeated,) = looked_at([{"text": "a"}] * 3, "text").problems
    assert (repeated.code, repeated.count) == ("repeated-rows", 2)


def test_margins_in_some_rows_only_are_told() -> None:
    pair = {"chosen": "b", "rejected": "c"}
    rows = [{"prompt": str(n), **pair, **({"margin": 1.0} if n < 4 else {})} for n in range(10)]
    told = {each.code: each for each in looked_at(rows, "preference").problems}["some-margins"]
    assert (told.count, told.level) == (6, Level.WARNING)
    assert "4 of 10 rows" in told.title and "`columns: {margin: OTHER}`" in str(told.fix)
    for whole in (rows[:4], rows[4:]):
        assert "some-margins" not in {each.code for each in looked_at(whole, "preference").problems}


def test_counts_are_whole_and_examples_few() -> None:
    (problem,) = looked_at([{"text": f"{n} </s>"} for n in range(40)], "text").problems
    assert problem.count == 40
    assert [place for place, _ in problem.examples] == [f"row {n}" for n in range(1, 6)]


def test_the_stage_reports_or_refuses(tmp_path: Path) -> None:
    rows = [{"text": "a </s>"}, {"text": "b"}]
    inputs = {"data": [dataset(tmp_path / "d", rows, "text")]}
    run = run_stage(Validate(), tmp_path, inputs)
    facts = run.described["report"][1]
    assert facts == ReportFacts(
        report="validation", figures={"rows": 2.0, "errors": 0.0, "found.control-token": 1.0}
    )
    report = json.loads((run.output("report") / "report.json").read_text())
    assert report["problems"][0]["examples"] == [
        {"place": "row 1", "found": "completion holds '</s>' at character 3"}
    ]
    assert run.said == [(Level.WARNING, "1 row: text that tokenizers read as control tokens")]
    with pytest.raises(DataError, match="1 kind of warning") as caught:
        run_stage(Validate(), tmp_path / "strict", inputs, refuse="warning")
    assert "row 1: completion holds" in str(caught.value.found)


def test_an_unknown_check_is_refused() -> None:
    with pytest.raises(ConfigProblems) as caught:
        configured(Validate(), ignore=["everything"])
    assert "there is no check 'everything'" in caught.value.problems[0].message


def test_a_file_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"text": "a"}\n{broken\n{"text": 3}\n{"text": " "}\n["x"]\n{"text": "b\\ud800"}\n{"text": "</s>"}\n'
    )
    report = inspect_file(path, None, checks_of(ValidateConfig()))
    problems = {problem.code: problem for problem in report.problems}
    assert problems["unreadable"].count == 2
    assert problems["unreadable"].examples[0][0] == "line 2"
    assert [place for place, _ in problems["unsuited"].examples] == ["line 3", "line 4", "line 6"]
    assert problems["control-token"].examples[0][0] == "line 7"
    assert next(iter(problems)) in ("unreadable", "unsuited")


def test_a_file_of_no_format_is_a_problem_and_no_crash(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{\n')
    report = inspect_file(path, None, checks_of(ValidateConfig()))
    assert {problem.code for problem in report.problems} == {"format", "unreadable"}


def test_the_command_says_it_with_its_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("good.jsonl").write_text('{"text": "a"}\n')
    Path("odd.jsonl").write_text('{"text": "a </s>"}\n')
    Path("bad.jsonl").write_text('{"text": "a"}\n{"txt": "b"}\n')

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["data", "validate", *arguments], catch_exceptions=False)

    assert run("good.jsonl").exit_code == 0
    assert run("odd.jsonl").exit_code == 0
    assert run("odd.jsonl", "--strict").exit_code == 1
    bad = run("bad.jsonl", "--output", "reports/report.json")
    assert bad.exit_code == 1
    assert "line 2: no column `text`; the row has `txt`" in bad.stdout
    report = json.loads(run("bad.jsonl", "--json").stdout)
    assert (report["format"], report["rows"]) == ("text", 2)
    assert report["problems"] == json.loads(Path("reports/report.json").read_text())["problems"]
