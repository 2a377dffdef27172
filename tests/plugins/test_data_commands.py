"""What the verbs of `posttrain data` have in common: how they read files, and what they tell of rows that are lost."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.looking import jsonl, model_at, turns
from typer.testing import CliRunner, Result

from posttrain.cli.app import app
from posttrain.errors import DataError, PosttrainError, SpecError
from posttrain_plugins.commands import progress
from posttrain_plugins.commands.wording import worded

RENAMED = [{"question": f"q{n}", "reply": f"a{n}"} for n in range(4)]
NAMES = ("--columns", "question=prompt", "--columns", "reply=completion")
PLUGIN = '''
from posttrain import Format, Passage, Registration, hookimpl

POSTTRAIN_API = ">=1,<2"


class Riddles(Format):
    """Riddles."""

    columns = ("riddle", "reply")
    becomes = "prompt_completion"

    def problem(self, row):
        return None if row["riddle"] else "`riddle` is empty"

    def rows(self, row):
        yield {"prompt": row["riddle"], "completion": row["reply"]}

    def passages(self, row):
        return (Passage("completion", row["riddle"], row["reply"]),)


@hookimpl
def posttrain_formats():
    return [Registration("acme/riddles", "Riddles", Riddles)]
'''


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["data", *arguments], catch_exceptions=False)


def told(*arguments: str) -> Any:
    return json.loads(run(*arguments, "--json").stdout)


def rated(*scores: int) -> dict[str, Any]:
    completions = [{"response": f"r{n}", "rating": score} for n, score in enumerate(scores)]
    return {"instruction": "a", "completions": completions}


def test_every_verb_renames_columns() -> None:
    jsonl(Path("qa.jsonl"), RENAMED)
    model_at(Path("model"))
    assert told("validate", "qa.jsonl", *NAMES)["format"] == "prompt_completion"
    assert told("statistics", "qa.jsonl", *NAMES)["rows"] == 4
    assert told("dedup", "qa.jsonl", "--exact", *NAMES)["figures"]["kept"] == 4
    assert told("inspect", "qa.jsonl", "--model", "model", *NAMES)["training"]["usable"] == 4
    assert (
        told("split", "qa.jsonl", "--test", "0.5", "--output", "parts", *NAMES)["format"]
        == "prompt_completion"
    )
    run("convert", "qa.jsonl", "--to", "prompt", "--output", "out.jsonl", *NAMES)
    assert json.loads(Path("out.jsonl").read_text().splitlines()[0]) == {"prompt": "q0"}
    with pytest.raises(SpecError, match="its old and its new name"):
        run("validate", "qa.jsonl", "--columns", "question")
    with pytest.raises(DataError, match="no column `title` to rename"):
        run("statistics", "qa.jsonl", "--columns", "title=prompt")


def test_a_format_of_a_local_file() -> None:
    Path("riddles.py").write_text(PLUGIN)
    jsonl(Path("rows.jsonl"), [{"riddle": "r", "reply": "a"}])
    given = ("rows.jsonl", "--format", "acme/riddles", "--file", "riddles.py")
    assert told("validate", *given)["made"] == 1
    assert told("statistics", *given)["format"] == "prompt_completion"
    run("convert", *given, "--to", "prompt_completion", "--output", "out.jsonl")
    assert json.loads(Path("out.jsonl").read_text()) == {"prompt": "r", "completion": "a"}
    with pytest.raises(PosttrainError, match="acme/riddles"):
        run("validate", "rows.jsonl", "--format", "acme/riddles")


def test_fixes_name_options_of_the_command() -> None:
    jsonl(Path("both.jsonl"), [{"text": "t", "prompt": "p", "completion": "c"}] * 2)
    with pytest.raises(DataError) as caught:
        run("statistics", "both.jsonl")
    assert "`--format prompt_completion`" in str(caught.value.fix)
    (problem,) = told("validate", "both.jsonl")["problems"]
    assert (problem["title"], problem["count"]) == ("several formats fit", 2)
    assert "`--format prompt_completion`" in problem["fix"]
    assert (
        worded("rename columns, for example `columns: {question: prompt, answer: completion}`")
        == "rename columns, for example `--columns question=prompt --columns answer=completion`"
    )


def test_converted_rows_are_recognised_again() -> None:
    pair = {"chosen": turns("a", "b"), "rejected": turns("a", "c")}
    jsonl(Path("pairs.jsonl"), [{"prompt": "a", **pair, "messages": turns("a", "b"), "id": 7}])
    arguments = ("convert", "pairs.jsonl", "--format", "full_preference", "--to", "preference")
    found = told(*arguments, "--output", "out.jsonl")
    assert found["dropped_columns"] == {"messages": 1}
    assert json.loads(Path("out.jsonl").read_text()).keys() == {"prompt", "chosen", "rejected", "id"}
    assert told("validate", "out.jsonl")["format"] == "preference"
    shown = run(*arguments, "--output", "again.jsonl").stdout
    assert "the column `messages` was left out of 1 row: with it they would be taken" in shown


def test_rows_that_do_not_suit_are_skipped_and_counted() -> None:
    jsonl(Path("qa.jsonl"), [{"prompt": "a", "completion": "b"}, {"prompt": "", "completion": "c"}])
    arguments = ("convert", "qa.jsonl", "--to", "messages", "--output", "out.jsonl", "--overwrite")
    with pytest.raises(DataError, match="line 2"):
        run(*arguments)
    found = told(*arguments, "--skip-invalid")
    assert (found["read"], found["unsuited"], found["rows"], found["made"]) == (2, 1, 1, 1)
    assert "1 row left out: line 2: `prompt` is empty" in run(*arguments, "--skip-invalid").stdout


def test_rows_that_give_none_are_told() -> None:
    jsonl(Path("rated.jsonl"), [rated(1, 2), rated(3, 3), rated(2, 1)])
    arguments = ("convert", "rated.jsonl", "--to", "preference", "--output", "out.jsonl")
    found = told(*arguments)
    assert (found["read"], found["silent"], found["rows"], found["made"]) == (3, 1, 2, 2)
    shown = run(*arguments, "--overwrite").stdout
    assert "3 `ultrafeedback` rows became 2 `preference` rows; 1 gave none, such as equal ratings" in shown
    report = told("validate", "rated.jsonl")
    assert (report["rows"], report["source"], report["made"]) == (3, "ultrafeedback", 2)
    silent = next(each for each in report["problems"] if each["code"] == "silent")
    assert (silent["level"], silent["count"], silent["examples"][0]["place"]) == ("note", 1, "line 2")
    assert "3 `ultrafeedback` rows that became 2 `preference` rows" in run("validate", "rated.jsonl").stdout


def test_another_template_on_the_models_tokenizer() -> None:
    jsonl(Path("chats.jsonl"), [{"messages": turns("a", "b")}])
    model_at(Path("model"))
    Path("plain.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    )
    arguments = ("inspect", "chats.jsonl", "--model", "model")
    own, zephyr = told(*arguments), told(*arguments, "--template", "plain.jinja")
    text = "".join(piece["text"] for piece in zephyr["shown"][0]["sides"][0]["pieces"])
    assert text == "user: a<|im_end|>assistant: b<|im_end|>"
    assert own["model"]["template"] != zephyr["model"]["template"]
    assert zephyr["model"]["label"] == "model with the chat template plain.jinja"
    assert told(*arguments, "--template", "chatml")["training"]["usable"] == 1
    with pytest.raises(DataError, match="neither a chat template nor a file"):
        run(*arguments, "--template", "nothing")


def test_a_page_is_not_replaced_unasked() -> None:
    jsonl(Path("chats.jsonl"), [{"messages": turns("a", "b")}])
    model_at(Path("model"))
    arguments = ("inspect", "chats.jsonl", "--model", "model", "--html", "page.html")
    assert run(*arguments).exit_code == 0
    with pytest.raises(DataError, match="there already"):
        run(*arguments)
    assert run(*arguments, "--overwrite").exit_code == 0


def test_reading_is_counted_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    class Source:
        source, merged = "rows", False

        def entries(self) -> Any:
            return iter([(f"line {n}", {"text": "a"}) for n in range(3)])

    monkeypatch.setattr(progress, "_PAUSE", -1.0)
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    assert len(list(progress.Watched(Source()).entries())) == 3
    assert "2 rows read" in screen.getvalue()
    assert screen.getvalue().endswith("\r\x1b[K")
    monkeypatch.setattr(sys, "stderr", pipe := io.StringIO())
    assert len(list(progress.Watched(Source()).entries())) == 3
    assert pipe.getvalue() == ""
