"""Bad input that `plan` finds: one clear error with place, find and fix, code 2, no traceback, nothing started.

A new bad input is one more row of a table.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from posttrain.cli import main

Command = Callable[..., tuple[int, str]]

TRAIN = """\
stages:
  base: {uses: model.init, inputs: {data: rows}, with: {hidden_size: 32}}
  rows: {uses: data.load, with: {path: rows.jsonl}}
  sft: {uses: train.sft, inputs: {model: base, data: rows}, with: {max_steps: 2}}
"""
GOOD = b'{"prompt": "a", "completion": "b"}\n{"prompt": "c", "completion": "d"}\n'


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The `posttrain` command in an empty directory, in this process: code and all that it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")

    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["posttrain", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out + printed.err

    return call


def refused(command: Command, base: Path, says: tuple[str, ...]) -> None:
    """Both verbs refuse: `plan` shows everything, `run` starts nothing."""
    for arguments in (("plan", "p.yaml"), ("run", "p.yaml", "--runner", "sequential")):
        code, text = command(*arguments)
        assert code == 2, text
        assert "Traceback" not in text
        for part in says:
            assert part in text, text
    workspace = base / ".posttrain"
    assert not (workspace / "runs").exists()
    assert not (workspace / "store" / "objects").exists()


DATA: Mapping[str, tuple[bytes | None, tuple[str, ...]]] = {
    "a missing file": (None, ("rows.jsonl", "check `path`")),
    "an empty file": (b"", ("rows.jsonl", "holds no rows")),
    "a row without its column": (
        b'{"prompt": "a", "completion": "b"}\n{"prompt": "c"}\n',
        ("rows.jsonl: line 2", "no column `completion`", "the row has `prompt`"),
    ),
    "a column of mixed types": (
        b'{"prompt": "a", "completion": "b"}\n{"prompt": "c", "completion": 3}\n',
        ("rows.jsonl: line 2", "`completion` is number", "not a string or a list of messages"),
    ),
    "a line that was cut off": (
        b'{"prompt": "a", "completion": "b"}\n{"prompt": "c", "compl',
        ("rows.jsonl: line 2", "invalid JSON", "may have been cut off"),
    ),
    "bytes that are no text": (b"\xff\xfe\x00\n", ("rows.jsonl: line 1", "not UTF-8 (0xff)")),
    "rows that are no objects": (b"[1, 2]\n", ("rows.jsonl: line 1", "must be a JSON object, not an array")),
    "columns of no format": (
        b'{"question": "a", "answer": "b"}\n',
        (
            "fit no dataset format",
            "1 row with `question`, `answer`, from line 1",
            "columns: {question: prompt, answer: completion}",
        ),
    ),
    "an empty answer": (b'{"prompt": "a", "completion": ""}\n', ("rows.jsonl: line 1", "`completion` is empty")),
    "a conversation of no turns": (b'{"messages": []}\n', ("rows.jsonl: line 1", "`messages` is an empty list")),
    "a turn without a role": (b'{"messages": [{"content": "a"}]}\n', ("rows.jsonl: line 1", "role")),
    "data of another format": (
        b'{"prompt": "a", "chosen": "b", "rejected": "c"}\n',
        ("sft.data", "preference", "prompt_completion"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("content", "says"), DATA.values(), ids=DATA.keys())
def test_data(command: Command, tmp_path: Path, content: bytes | None, says: tuple[str, ...]) -> None:
    (tmp_path / "p.yaml").write_text(TRAIN)
    if content is not None:
        (tmp_path / "rows.jsonl").write_bytes(content)
    refused(command, tmp_path, says)


SPECS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "an empty pipeline": ("", ("p.yaml",)),
    "broken YAML": ("stages:\n  a: {uses: [\n", ("p.yaml:3",)),
    "no stages": ("name: x\n", ("p.yaml", "stages")),
    "an unknown key at the top": ("stags: {}\n" + TRAIN, ("p.yaml:1:1", "stags", "stages")),
    "an unknown key of a stage": (
        TRAIN.replace("{uses: data.load, with:", "{uses: data.load, wiht:"),
        ("p.yaml:3", "wiht", "with"),
    ),
    "an unknown option": (
        TRAIN.replace("max_steps", "max_step"),
        ("p.yaml:4", "max_step", "max_steps"),
    ),
    "an unknown option of a component": (
        TRAIN.replace("max_steps: 2", "max_steps: 2, loss: {name: nll, betta: 1}"),
        ("p.yaml:4", "stages.sft.with.loss.betta", "expected: no options"),
    ),
    "an unknown loss": (TRAIN.replace("max_steps: 2", "loss: nlll"), ("p.yaml:4", "nlll", "nll")),
    "a loss of another family": (
        TRAIN.replace("max_steps: 2", "loss: sigmoid"),
        ("p.yaml:4", "sigmoid", "token"),
    ),
    "an unknown stage": (TRAIN.replace("train.sft", "train.stf"), ("p.yaml:4", "train.stf", "train.sft")),
    "an unknown port": (
        TRAIN.replace("{model: base, data: rows}}, with", "{model: base, data: rows}, with").replace(
            "inputs: {model: base,", "inputs: {modle: base,"
        ),
        ("p.yaml:4", "modle", "model"),
    ),
    "an input that nobody makes": (
        TRAIN.replace("data: rows}, with: {max", "data: rose}, with: {max"),
        ("p.yaml:4", "rose", "rows"),
    ),
    "a circle": (
        TRAIN.replace("rows: {uses: data.load,", "rows: {uses: data.load, needs: [sft],"),
        ("p.yaml", "rows", "sft"),
    ),
    "a word for a number": (
        TRAIN.replace("max_steps: 2", "max_steps: two"),
        ("p.yaml:4", "stages.sft.with.max_steps", "two"),
    ),
    "a number out of range": (
        TRAIN.replace("max_steps: 2", "learning_rate: -1"),
        ("p.yaml:4", "stages.sft.with.learning_rate", "-1", "greater than 0"),
    ),
    "an option that another makes void": (
        TRAIN.replace("max_steps: 2", "max_steps: 2, num_train_epochs: 1"),
        ("p.yaml:4", "num_train_epochs", "max_steps"),
    ),
    "a key written twice": (TRAIN + "  sft: {uses: train.sft}\n", ("p.yaml:5", "sft")),
    "a plugin file that is not there": ("plugins: [./mine.py]\n" + TRAIN.replace("train.sft", "mine"), ("mine",)),
    "answers longer than the context": (
        TRAIN + "  eval: {uses: evaluate, inputs: {models: sft, data: rows}, with: {max_new_tokens: 4096}}\n",
        ("max_new_tokens", "4096"),
    ),
    "a gate that decides nothing": (
        TRAIN
        + "  eval: {uses: evaluate, inputs: {models: sft, data: rows}, with: {max_new_tokens: 4}}\n"
        + "  gate: {uses: gate, inputs: {report: eval, candidate: sft}}\n",
        ("gate", "baseline", "threshold"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "says"), SPECS.values(), ids=SPECS.keys())
def test_pipelines(command: Command, tmp_path: Path, text: str, says: tuple[str, ...]) -> None:
    (tmp_path / "p.yaml").write_text(text)
    (tmp_path / "rows.jsonl").write_bytes(GOOD)
    refused(command, tmp_path, says)


ARGUMENTS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "a pipeline that is not there": (("plan", "q.yaml"), ("q.yaml",)),
    "a recipe that is not there": (("plan", "quickstrat"), ("quickstrat", "quickstart")),
    "an override of an unknown option": (
        ("plan", "p.yaml", "--set", "stages.sft.with.max_step=2"),
        ("--set", "max_step", "max_steps"),
    ),
    "an override of an unknown stage": (
        ("plan", "p.yaml", "--set", "stages.stf.with.max_steps=2"),
        ("stf",),
    ),
    "an override without a value": (("plan", "p.yaml", "--set", "stages.sft.with.max_steps"), ("--set", "=")),
    "an override of the wrong type": (
        ("plan", "p.yaml", "--set", "stages.sft.with.max_steps=many"),
        ("--set", "max_steps", "many"),
    ),
    "an unknown stage to select": (("plan", "p.yaml", "--only", "stf"), ("stf", "sft")),
    "an unknown runner": (("run", "p.yaml", "--runner", "perfect"), ("--runner", "perfect", "prefect")),
    "an unknown verb": (("runn", "p.yaml"), ("runn", "run")),
    "what has to be cached is not": (("run", "p.yaml", "--from", "sft"), ("--from", "rows")),
}


@pytest.mark.parametrize(("arguments", "says"), ARGUMENTS.values(), ids=ARGUMENTS.keys())
def test_arguments(
    command: Command, tmp_path: Path, arguments: tuple[str, ...], says: tuple[str, ...]
) -> None:
    (tmp_path / "p.yaml").write_text(TRAIN)
    (tmp_path / "rows.jsonl").write_bytes(GOOD)
    code, text = command(*arguments)
    assert code == 2, text
    assert "Traceback" not in text
    for part in says:
        assert part in text, text
    assert not (tmp_path / ".posttrain" / "runs").exists()


MISSING: Mapping[str, tuple[str, ...]] = {
    "resume": ("there is no such run", "posttrain run"),
    "explain": ("nothing",),
    "diff": ("nothing",),
    "status": ("there is no such run", "nothing"),
    "sync": ("nothing",),
}


@pytest.mark.parametrize("verb", MISSING)
def test_what_is_not_there_is_named(command: Command, verb: str) -> None:
    arguments = [verb] if verb == "resume" else [verb, "nothing", *(["else"] if verb == "diff" else [])]
    code, text = command(*arguments)
    assert code == (1 if verb == "resume" else 2), text
    assert "Traceback" not in text
    for part in MISSING[verb]:
        assert part in text, text


def test_a_tokenizer_without_a_chat_template(command: Command, tmp_path: Path) -> None:
    from helpers.models import save_tiny_model

    save_tiny_model(tmp_path / "plain", template=None)
    turns: list[dict[str, Any]] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    (tmp_path / "p.yaml").write_text(
        TRAIN.replace(
            "uses: model.init, inputs: {data: rows}, with: {hidden_size: 32}",
            "uses: model.load, with: {path: plain}",
        )
    )
    refused(command, tmp_path, ("sft.model", "base.model has no chat template", "template: chatml"))
