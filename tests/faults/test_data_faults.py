"""Content that is odd or broken, on its way from a file to what is learned, and what rows lost on it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from helpers.contexts import catalogue
from helpers.evaluation import Context, dataset
from helpers.looking import CHATML, model_at
from helpers.nasty import KINDS, conversation, encoder_of
from helpers.planning import command, graph
from helpers.scripts import assistant, user
from helpers.stages import run_stage
from helpers.tokenizers_of_all_kinds import write
from helpers.training import model_artifact

from posttrain import NoOptions, Sample
from posttrain.artifacts.digest import DigestMemo
from posttrain.artifacts.kinds import Kind, PolicyFacts
from posttrain.artifacts.store import Store
from posttrain.contracts.passage import Passage
from posttrain.errors import DataError
from posttrain.planning.keys import key_ingredients, key_of
from posttrain_plugins.data import best_of_n
from posttrain_plugins.data.best_of_n import BestOfNConfig
from posttrain_plugins.data.formats import format_of
from posttrain_plugins.data.load import Load
from posttrain_plugins.data.rows import read_rows
from posttrain_plugins.evaluation import measure
from posttrain_plugins.evaluation.evaluate import EvaluateConfig
from posttrain_plugins.inspection import pieces
from posttrain_plugins.preparation.examples import Prepared, prepare
from posttrain_plugins.rollouts import generation
from posttrain_plugins.templates.encoder import Encoder
from posttrain_plugins.trainers.sft import Sft

MIB = 1024**2


def prepared(encoder: Encoder, rows: Sequence[Mapping[str, Any]], format: str, **options: Any) -> Prepared:
    given = {"max_length": None, "truncation": "error", "weight_column": None, **options}
    return prepare(Sft(), rows, encoder, format_of(format), **given)


def strange_rows(seed: str, count: int = 12) -> list[dict[str, Any]]:
    random = Random(seed)
    return [{"messages": conversation(random)} for _ in range(count)]


@pytest.mark.parametrize("ascii_only", [True, False])
def test_strange_content_is_learned_as_it_stands_in_the_file(tmp_path: Path, ascii_only: bool) -> None:
    """Marks at the beginning of a file, line breaks of Windows, line separators in texts: rows and masks moved."""
    rows = strange_rows("file")
    lines = [json.dumps(row, ensure_ascii=ascii_only) for row in rows]
    path = tmp_path / "rows.jsonl"
    path.write_bytes("\ufeff".encode() + "".join(line + "\r\n" for line in lines).encode())
    data = run_stage(Load(), tmp_path / "load", path=str(path)).result("data")
    assert read_rows(data) == rows
    model = model_at(tmp_path / "model")
    direct = prepared(Encoder.open(model), rows, "messages")
    assert prepared(Encoder.open(model), read_rows(data), "messages").examples == direct.examples
    told = command("data", "inspect", path, "--model", model, "--row", f"1-{len(rows)}", "--json")
    assert told.code == 0, told.err
    for row, example in zip(json.loads(told.out)["shown"], direct.examples, strict=True):
        (side,) = row["sides"]
        shown = [piece for piece in side["pieces"] if piece["id"] is not None]
        assert [piece["id"] for piece in shown] == list(example.sequences[0].tokens)
        assert [piece["supervised"] for piece in shown] == list(map(bool, example.sequences[0].supervised))
    for target in ([], ["--html", tmp_path / "page.html"]):
        assert command("data", "inspect", path, "--model", model, *target).code == 0


LONG = "a" * MIB


@pytest.mark.parametrize(("kind", "truncation"), [("byte-level", "keep_end"), ("word-piece", "keep_start")])
def test_a_megabyte_without_a_break_is_one_row_among_others(
    tmp_path: Path, kind: str, truncation: str
) -> None:
    """Tokenizers take a word that long for one token, or for a million."""
    encoder = encoder_of(tmp_path, kind, "chatml")
    rows = [{"prompt": prompt, "completion": "ναι"} for prompt in ("да ", f"{LONG} ", "да ")]
    made = prepared(encoder, rows, "prompt_completion", max_length=512, truncation=truncation)
    first, long, last = made.examples
    assert first.sequences[0].tokens == last.sequences[0].tokens
    assert long.sequences[0].tokens[-first.predicted :] == first.sequences[0].tokens[-first.predicted :]
    assert long.predicted == first.predicted
    assert long.longest == (512 if kind == "byte-level" else first.longest)


def test_looking_at_a_long_text_that_spells_a_control_token_compares_no_token_with_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of training and of the text differ where one is spelled; to compare all of them took hours."""
    compared: list[int] = []

    class Watched(pieces.SequenceMatcher):  # type: ignore[misc,type-arg]
        def __init__(self, junk: Any, one: Sequence[int], other: Sequence[int], autojunk: bool) -> None:
            compared.append(0 if autojunk else len(one) * len(other))
            super().__init__(junk, one, other, autojunk=autojunk)

    monkeypatch.setattr(pieces, "SequenceMatcher", Watched)
    encoder = Encoder.open(model_at(tmp_path))
    long = "<|im_end|>" + "b" * 5000 + "<|im_end|>"
    passage = Passage("completion", None, [user(long), assistant("a" * 5000)])
    reading, (found,) = encoder.read(passage), encoder.encode([passage])
    assert not isinstance(found, DataError)
    places = pieces.located(encoder, reading.text, found.tokens, reading.controls)
    assert "".join(reading.text[start:end] for start, end in places) == reading.text
    assert compared == []
    without = pieces.located(encoder, reading.text, found.tokens)
    assert len(without) == len(found.tokens)
    assert all(count <= 1_000_000 for count in compared)


VERBS: Mapping[str, Sequence[str]] = {
    "validate": ("{}",),
    "statistics": ("{}",),
    "inspect": ("{}", "--model", "{model}"),
    "convert": ("{}", "--to", "prompt_completion", "--output", "{output}"),
    "mix": ("{}", "{}", "--output", "{output}"),
    "split": ("{}", "--test", "0.5", "--output", "{output}"),
    "dedup": ("{}", "--output", "{output}"),
    "contamination": ("--train", "{}", "--evaluation", "{}"),
}


def arguments(verb: str, path: Path, directory: Path) -> list[str]:
    model = directory / "model"
    if verb == "inspect" and not model.exists():
        model_at(model)
    return [each.format(path, model=model, output=directory / "output") for each in VERBS[verb]]


CODE = """
import contextlib, io, json, sys
from pathlib import Path
from posttrain.cli.app import run
for line in json.loads(sys.argv[1]):
    sys.argv = ["posttrain", "data", *line]
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told), contextlib.suppress(SystemExit):
        run()
    status = dict(part.split(":", 1) for part in Path("/proc/self/status").read_text().splitlines())
    print(json.dumps([line[0], told.getvalue(), int(status["VmHWM"].split()[0])]))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from /proc")
def test_no_command_takes_a_line_of_two_gigabytes_into_memory(tmp_path: Path) -> None:
    """A whole dataset on one line, or a file that a crash filled up with zeros."""
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(b'{"text": "')
        file.truncate(2048 * MIB)
    lines = [[verb, *arguments(verb, path, tmp_path)] for verb in VERBS]
    run = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(lines)], capture_output=True, text=True, check=True
    )
    told = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(told) == len(VERBS)
    for verb, message, kilobytes in told:
        assert "a.jsonl: line 1 is longer than 64 MiB" in " ".join(message.split()), verb
        assert kilobytes < 400 * 1024, verb


BROKEN: Mapping[str, tuple[bytes, str]] = {
    "garbage": (bytes((number * 167 + 13) % 256 for number in range(4000)), "line 1"),
    "zeros": (b'{"text": "a"}\n' + bytes(4000), "line 2"),
    "half a character": (
        b'{"text": "a"}\n{"text": "\\ud83d"}\n',
        "line 2: `text` holds half a surrogate pair",
    ),
    "half a byte sequence": (b'{"text": "a"}\n{"text": "\xf0\x9f"}\n', "line 2: byte 11"),
    "nested": (b'{"text": "a"}\n{"text": ' + b"[" * 100_000 + b"\n", "line 2"),
    "another column": (b'{"text": "a"}\n{"text": 3}\n', "line 2: `text` is number"),
    "nothing": (b"", "rows.jsonl"),
}


@pytest.mark.parametrize("content", BROKEN)
@pytest.mark.parametrize("verb", VERBS)
def test_every_command_names_the_place_of_what_is_broken(tmp_path: Path, verb: str, content: str) -> None:
    """A person has to find the row: an error without file and line, or a traceback, is of no use."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(BROKEN[content][0])
    told = command("data", verb, *arguments(verb, path, tmp_path))
    said = " ".join((told.out + told.err).split())
    assert told.code in (1, 2), said
    assert "rows.jsonl" in said and BROKEN[content][1] in said
    assert "Traceback" not in said


HIDDEN: Mapping[str, tuple[str, str]] = {
    "half a character": ('[{"name": "\\ud800"}]', "holds half a surrogate pair"),
    "nested": ("[" * 100_000, "nested too deeply"),
    "a number of 5000 digits": (f'[{{"a": {"9" * 5000}}}]', "not valid JSON"),
    "no number": ('[{"a": NaN}]', "NaN is not JSON"),
    "cut off": ('[{"name": "a', "not valid JSON"),
}


@pytest.mark.parametrize("column", ["tools", "chat_template_kwargs"])
@pytest.mark.parametrize("value", HIDDEN)
def test_json_within_json_is_looked_into(tmp_path: Path, value: str, column: str) -> None:
    """Tools as text are clean until they are parsed, which is in the middle of a training."""
    good = {"messages": [user("да"), assistant("ναι")]}
    content, problem = HIDDEN[value]
    text = content if column == "tools" else f'{{"a": {content}}}'
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (good, {**good, column: text})))
    with pytest.raises(DataError) as caught:
        run_stage(Load(), tmp_path / "load", path=str(path))
    message = str(caught.value)
    assert f"line 2: the column `{column}`" in message and problem in message
    assert "rows.jsonl" in message


def test_rows_that_cannot_be_tokenized_are_named(tmp_path: Path) -> None:
    """Rows that no file was read for, as a stage of somebody else makes them."""
    encoder = encoder_of(tmp_path, "byte-level", "chatml")
    rows = [*strange_rows("named", 3), {"messages": [user("да\ud83d"), assistant("ναι")]}]
    with pytest.raises(DataError, match="half a surrogate pair") as caught:
        prepared(encoder, rows, "messages")
    assert caught.value.where == "row 4"


MOODY = "{{ mood }}" + CHATML
MOODS = [
    {"prompt": [user(word)], "completion": [assistant("ναι")], "chat_template_kwargs": {"mood": mood}}
    for word, mood in (("да", "old"), ("и", "new"))
]


class Asked(Exception):
    """Raised in place of an answer, with the prompts."""


def asking(policy: Any, prompts: Sequence[Sequence[int]], **_: Any) -> Any:
    raise Asked([policy.encoder.decode(prompt, skip_special=False) for prompt in prompts])


@pytest.mark.parametrize("what", ["evaluate", "best of n"])
def test_a_policy_is_asked_as_it_was_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """What a row gives its template besides was known to the training alone: thinking was off there and on here."""
    monkeypatch.setattr(measure, "generate", asking)
    monkeypatch.setattr(generation, "generate", asking)
    alphabet = "oldnewNOLDNEWasitu\nrmdаинιдναь<|_>"
    model = model_artifact(tmp_path / "model", alphabet=alphabet, template=MOODY)
    data = dataset(tmp_path / "data", MOODS, "prompt_completion")
    config: Any = EvaluateConfig() if what == "evaluate" else BestOfNConfig(reward={"name": "exact"})  # type: ignore[arg-type]
    port = {
        "evaluate": {"models": [model], "data": [data]},
        "best of n": {"model": [model], "prompts": [data]},
    }
    with pytest.raises(Asked) as caught:
        (measure.run if what == "evaluate" else best_of_n.run)(Context(tmp_path, config, port[what]))
    (prompts,) = caught.value.args
    encoder = Encoder.open(model.path)
    trained = prepared(encoder, MOODS, "prompt_completion")
    for prompt, example, mood in zip(prompts, trained.examples, ("old", "new"), strict=True):
        whole = encoder.decode(list(example.sequences[0].tokens), skip_special=False)
        assert prompt.startswith(mood) and whole.startswith(prompt)


class Echo:
    """Scores by length and remembers what it was given."""

    config = NoOptions

    def __init__(self) -> None:
        self.given: list[Sample] = []

    def __call__(self, samples: Sequence[Sample], config: Any) -> list[float | None]:
        self.given.extend(samples)
        return [float(len(sample.completion)) for sample in samples]


def test_a_reward_sees_the_row_that_its_completion_answers(tmp_path: Path) -> None:
    """Columns were dropped, not repeated for each completion, or those of another row after sorting."""
    rows = [{"prompt": f"say {number}:" + "a" * (7 * number % 5), "number": number} for number in range(6)]
    model = model_artifact(tmp_path / "model", initializer_range=0.3)
    inputs = {"model": [model], "prompts": [dataset(tmp_path / "data", rows, "prompt")]}
    options = {"n": 3, "max_new_tokens": 4, "allow_truncated": True, "batch_tokens": 40}
    reward = Echo()
    best_of_n.run(Context(tmp_path, BestOfNConfig(reward={"name": "r"}, **options), inputs, {"r": reward}))
    assert {sample.row["number"] for sample in reward.given} == set(range(6))
    for sample in reward.given:
        assert sample.row == rows[sample.row["number"]]
        assert [turn["content"] for turn in sample.prompt] == [sample.row["prompt"]]


TOKENIZING = """
    stages:
      base: {uses: model.load, with: {path: /models/a}}
      rows: {uses: data.load, with: {path: /data/rows.jsonl}}
      tokens: {uses: data.tokenize, inputs: {data: rows, model: base}}
"""


def model_digest(directory: Path, name: str, kind: str, template: str) -> str:
    """The digest of a model of which tokenizer and template are all that may differ."""
    store = Store(directory / ".posttrain")
    made = write(store.scratch(name), kind, template, ("<|im_end|>",), eos="<|im_end|>", kinds=KINDS)
    return store.seal(made, Kind.MODEL, PolicyFacts(architecture="none")).digest


def test_tokens_are_made_again_when_something_that_made_them_changes(tmp_path: Path) -> None:
    """A cache that does not know of the template, the tokenizer or an option trains on the tokens of another run."""
    plain, other = CHATML, CHATML + "{# another text, though nothing else is written #}"
    models = {
        "same": model_digest(tmp_path, "one", "byte-level", plain),
        "again": model_digest(tmp_path, "two", "byte-level", plain),
        "template": model_digest(tmp_path, "three", "byte-level", other),
        "tokenizer": model_digest(tmp_path, "four", "composing", plain),
    }
    options = ("max_length=90", "truncation=drop", "supervise=everything", "weight_column=w")

    def key(model: str, data: str = "d", *sets: str) -> str:
        made = graph(TOKENIZING, *sets, plugins=catalogue())
        inputs = {"data": [data * 64], "model": [models[model]]}
        memo = DigestMemo(tmp_path / "memo.sqlite")
        return key_of(key_ingredients(made.nodes["tokens"], catalogue(), inputs, tmp_path, memo))

    changed = [key("template"), key("tokenizer"), key("same", "e")]
    changed += [key("same", "d", f"stages.tokens.with.{option}") for option in options]
    assert len({key("same"), *changed}) == 1 + len(changed)
    assert key("again") == key("same")
