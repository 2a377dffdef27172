"""What the verbs of `posttrain data` have in common: how they read files, and what they tell of rows that are lost."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.evaluation import dataset
from helpers.looking import jsonl, model_at, turns
from helpers.stages import run_stage
from typer.testing import CliRunner, Result

from posttrain.cli.app import app
from posttrain.errors import DataError, PosttrainError, SpecError
from posttrain_plugins.commands import progress
from posttrain_plugins.commands.wording import worded
from posttrain_plugins.data.mix import Mix
from posttrain_plugins.data.rows import read_rows

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


def test_columns_are_renamed_in_the_files_that_have_them() -> None:
    jsonl(Path("qa.jsonl"), RENAMED)
    jsonl(Path("plain.jsonl"), [{"prompt": f"q{n}", "completion": f"b{n}"} for n in range(6)])
    compared = told("contamination", "--train", "./qa.jsonl", "--evaluation", "plain.jsonl", *NAMES)
    assert compared["worst"] == pytest.approx(4 / 6)
    mixed = told("mix", "qa.jsonl", "plain.jsonl", "--output", "out.jsonl", *NAMES)
    assert (mixed["format"], mixed["rows"]) == ("prompt_completion", 10)
    with pytest.raises(SpecError, match="no file has this column") as caught:
        run("mix", "qa.jsonl", "plain.jsonl", "--output", "x.jsonl", "--columns", "title=prompt")
    assert caught.value.found == "title"
    jsonl(Path("later.jsonl"), [{"text": "a"}, {"text": "b", "title": "t"}])
    with pytest.raises(DataError, match="line 1: no column `title` to rename"):
        run("mix", "later.jsonl", "plain.jsonl", "--output", "x.jsonl", "--columns", "title=prompt")
    Path("riddles.py").write_text(PLUGIN)
    jsonl(Path("riddles.jsonl"), [{"riddle": "q1", "reply": "a"}])
    given = ("--format", "acme/riddles", "--file", "riddles.py")
    same = ("--train", "riddles.jsonl", "--evaluation", "riddles.jsonl")
    assert told("contamination", *same, *given)["worst"] == 1


def test_a_mixture_is_that_of_the_stage(tmp_path: Path) -> None:
    sets = [[{"prompt": f"{name}{n}", "completion": "c"} for n in range(10)] for name in "ab"]
    for name, rows in zip("ab", sets, strict=True):
        jsonl(Path(f"{name}.jsonl"), rows)
    options = {"weights": (0.75, 0.25), "names": ("one", "two"), "source_column": "of", "seed": 3}
    data = [
        dataset(tmp_path / name, rows, "prompt_completion") for name, rows in zip("ab", sets, strict=True)
    ]
    stage = read_rows(run_stage(Mix(), tmp_path / "mix", {"data": data}, **options).result("data"))
    shares = ("--weight", "0.75", "--weight", "0.25", "--name", "one", "--name", "two", "--seed", "3")
    shown = run("mix", "a.jsonl", "b.jsonl", *shares, "--source-column", "of", "--output", "out.jsonl").stdout
    assert shown == "13 rows: 10 of one, 3 of two\nwritten to out.jsonl\n"
    assert [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()] == stage
    with pytest.raises(DataError, match="there already"):
        run("mix", "a.jsonl", "b.jsonl", "--output", "out.jsonl")
    with pytest.raises(DataError, match="1 weights for 2 datasets"):
        run("mix", "a.jsonl", "b.jsonl", "--weight", "1", "--output", "x.jsonl")
    jsonl(Path("pairs.jsonl"), [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    with pytest.raises(DataError, match="different formats, preference, prompt_completion"):
        run("mix", "a.jsonl", "pairs.jsonl", "--output", "x.jsonl")


def test_a_format_by_the_name_of_its_trainer_is_proposed() -> None:
    jsonl(Path("rows.jsonl"), [{"prompt": "a", "completion": "b"}])
    for arguments in (
        ("convert", "rows.jsonl", "--to", "kto", "--output", "x"),
        ("validate", "rows.jsonl", "--format", "kto"),
    ):
        with pytest.raises(PosttrainError, match=r"there is no format .kto.") as caught:
            run(*arguments)
        assert caught.value.fix == "did you mean `unpaired_preference`?"


def test_weights_are_looked_at_by_name() -> None:
    jsonl(Path("rows.jsonl"), [{"text": "a", "weight": 1, "w": 1}, {"text": "b", "weight": -1, "w": -2}])
    assert run("validate", "rows.jsonl").exit_code == 0
    assert "warning weights: 1 row: " in run("validate", "rows.jsonl").stdout
    found = run("validate", "rows.jsonl", "--weight-column", "w")
    assert found.exit_code == 1 and "line 2: `w` is -2; a weight is at least 0" in found.stdout
    assert run("validate", "rows.jsonl", "--ignore", "weights", "--strict").exit_code == 0


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
