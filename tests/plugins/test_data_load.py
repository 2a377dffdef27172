from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.contexts import FakeContext
from helpers.stages import configured, contents, run_stage

from posttrain.artifacts.manifest import canonical, digest_of
from posttrain.contracts.format import Format, Row
from posttrain.contracts.passage import Passage
from posttrain.contracts.stage import Certainty, Level, SourceMark
from posttrain.errors import DataError
from posttrain.registry.components import ConfigProblems, marked, semantic
from posttrain_plugins.data.load import Load, LoadConfig, run
from posttrain_plugins.data.rows import prompt_hash, read_rows, trained_prompts


def rows_file(tmp_path: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> Path:
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts(count: int) -> list[dict[str, Any]]:
    return [{"text": f"text {number}"} for number in range(count)]


def test_without_a_split_there_is_one_dataset(tmp_path: Path) -> None:
    rows_file(tmp_path, texts(3))
    run = run_stage(Load(), tmp_path, path="rows.jsonl")
    assert read_rows(run.result("data")) == texts(3)
    assert run.described["data"][1].rows == 3
    assert run.outcome is not None
    assert run.outcome.figures == {"rows.data": 3.0}


def test_rows_keep_their_split_when_the_file_grows(tmp_path: Path) -> None:
    def split(count: int) -> dict[str, list[dict[str, Any]]]:
        directory = tmp_path / str(count)
        directory.mkdir()
        rows_file(directory, [{"text": "new, first"}] * (count > 60) + texts(count))
        run = run_stage(Load(), directory, path="rows.jsonl", split={"test": 0.2, "dev": 0.1})
        return {port: read_rows(run.result(port)) for port in ("train", "test", "dev")}

    small, large = split(60), split(200)
    assert sum(map(len, small.values())) == 60
    for name, rows in small.items():
        assert all(row in large[name] for row in rows)
    assert 20 <= len(large["test"]) <= 60


def test_the_same_file_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        rows_file(tmp_path / name, texts(30))
        run_stage(Load(), tmp_path / name, path="rows.jsonl", split={"test": 0.3})
    assert contents(tmp_path / "a" / "out-test") == contents(tmp_path / "b" / "out-test")


def test_the_order_in_which_splits_are_named_means_nothing(tmp_path: Path) -> None:
    rows_file(tmp_path, texts(100))
    orders = [{"test": 0.3, "dev": 0.2}, {"dev": 0.2, "test": 0.3}]
    configs = [configured(Load(), path="rows.jsonl", split=split) for split in orders]
    assert digest_of(semantic(configs[0])) == digest_of(semantic(configs[1]))
    recorded = json.loads(canonical(configs[0].model_dump(mode="json")))["split"]
    written = [
        contents(
            run_stage(Load(), tmp_path / str(i), path=str(tmp_path / "rows.jsonl"), split=split).output(port)
        )
        for i, split in enumerate([*orders, recorded])
        for port in ("train", "dev", "test")
    ]
    assert written[:3] == written[3:6] == written[6:]


def test_conversations_with_a_prompt_in_common_stay_together_by_default(tmp_path: Path) -> None:
    def turns(*contents: str) -> list[dict[str, str]]:
        return [
            {"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)
        ]

    rows = [
        {"messages": turns(f"q{n % 12}", "a", f"then {n}", "b")[: 2 + 2 * (n % 3 > 0)]} for n in range(96)
    ]
    rows_file(tmp_path, rows)
    run = run_stage(Load(), tmp_path, path="rows.jsonl", split={"test": 0.4})
    train, test = ((run.output(port) / "prompts.txt").read_text().split() for port in ("train", "test"))
    assert not trained_prompts(train) & trained_prompts(test)


def test_a_file_too_large_to_read_while_planning_is_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = rows_file(tmp_path, texts(1))
    path.write_text(path.read_text() + "{broken\n" + " " * (4 * 1024 * 1024))
    config = LoadConfig(path=str(path), format="text")
    (found,) = Load().check(config, {})
    assert (found.level, found.certainty) == (Level.NOTE, Certainty.UNKNOWN)
    assert "larger than 4 MB" in found.message
    assert Load().predict(config, {})["data"].facts.rows is None
    assert Load().prompts(config, "data", tmp_path) is None


def test_equal_rows_and_on_demand_equal_prompts_stay_together(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{n % 10}", "completion": f"c{n}"} for n in range(100)]
    rows_file(tmp_path, rows + rows)
    run = run_stage(Load(), tmp_path, path="rows.jsonl", split={"test": 0.5}, split_by="row")
    assert [r in read_rows(run.result("train")) for r in rows].count(True) * 2 == len(
        read_rows(run.result("train"))
    )
    by_prompt = run_stage(Load(), tmp_path / "p", path=str(tmp_path / "rows.jsonl"), split={"test": 0.5})
    train, test = ({row["prompt"] for row in read_rows(by_prompt.result(port))} for port in ("train", "test"))
    assert train.isdisjoint(test)


def test_rows_of_other_tools_become_canonical(tmp_path: Path) -> None:
    rows = [
        {"conversations": [{"from": "human", "value": f"q{n}"}, {"from": "gpt", "value": "a"}], "id": n}
        for n in range(40)
    ]
    path = rows_file(tmp_path, rows)
    stage, config = Load(), LoadConfig(path=str(path), split={"test": 0.25})
    predicted = stage.predict(config, {})
    run = run_stage(stage, tmp_path, path=str(path), split={"test": 0.25})
    for port in ("train", "test"):
        assert predicted[port].facts == run.described[port][1]
        assert predicted[port].facts.format == "messages"
        assert stage.prompts(config, port, Path("/")) == set(
            (run.output(port) / "prompts.txt").read_text().split()
        )
    assert run.notes == ["40 `sharegpt` rows became 40 `messages` rows"]
    assert {port.formats for port in stage.outputs(LoadConfig(path="a", format="sharegpt"))} == {
        frozenset({"messages"})
    }


def test_one_row_may_become_none(tmp_path: Path) -> None:
    def rated(*scores: int) -> dict[str, Any]:
        return {
            "instruction": "a",
            "completions": [{"response": f"r{n}", "rating": score} for n, score in enumerate(scores)],
        }

    rows_file(tmp_path, [rated(1, 2), rated(3, 3), rated(2, 1)])
    run = run_stage(Load(), tmp_path, path="rows.jsonl")
    assert [row["chosen"][0]["content"] for row in read_rows(run.result("data"))] == ["r1", "r0"]
    assert run.notes == [
        "3 `ultrafeedback` rows became 2 `preference` rows; 1 gave none, such as equal ratings"
    ]
    rows_file(tmp_path, [rated(3, 3)])
    with pytest.raises(DataError, match="no row of `ultrafeedback` was left"):
        run_stage(Load(), tmp_path / "b", path=str(tmp_path / "rows.jsonl"))


class Shouted(Format):
    """Texts in a column of their own."""

    columns = ("shout",)
    becomes = "text"

    def problem(self, row: Row) -> str | None:
        """Refuse whispers."""
        return None if str(row["shout"]).isupper() else "`shout` is a whisper"

    def rows(self, row: Row) -> Iterable[Row]:
        """Return the text."""
        return ({"text": row["shout"]},)

    def passages(self, row: Row) -> Sequence[Passage]:
        """Return nothing."""
        return ()


class Riddle(Format):
    """A canonical format of another plugin."""

    columns = ("riddle", "answer")

    def problem(self, row: Row) -> str | None:
        """Take everything."""
        return None

    def passages(self, row: Row) -> Sequence[Passage]:
        """Return the riddle and its answer."""
        return (Passage("completion", row["riddle"], row["answer"]),)


def with_format(
    tmp_path: Path, name: str, plugin: Format, rows: list[dict[str, Any]], **options: Any
) -> FakeContext:
    tmp_path.mkdir(exist_ok=True)
    rows_file(tmp_path, rows)
    config = LoadConfig(path="rows.jsonl", format=name, **options)
    context = FakeContext(tmp_path, Load(), config, {}, {name: plugin})
    run(context)
    return context


def test_formats_of_other_plugins_are_used_by_name(tmp_path: Path) -> None:
    context = with_format(tmp_path, "acme/shouted", Shouted(), [{"shout": "A"}])
    assert read_rows(context.result("data")) == [{"text": "A"}]
    config = LoadConfig(path=str(tmp_path / "rows.jsonl"), format="acme/shouted")
    assert Load().predict(config, {})["data"].facts.format is None
    assert list(Load().check(config, {})) == []
    assert Load().outputs(config)[0].formats == frozenset()
    with pytest.raises(DataError, match="line 1: `shout` is a whisper"):
        with_format(tmp_path / "b", "acme/shouted", Shouted(), [{"shout": "a"}])


def test_a_canonical_format_of_another_plugin_is_written_as_it_is(tmp_path: Path) -> None:
    rows = [{"riddle": f"r{n % 20}", "answer": f"a{n}"} for n in range(60)]
    context = with_format(tmp_path, "acme/riddle", Riddle(), rows, split={"test": 0.3})
    facts = context.described["train"][1]
    assert (facts.format, facts.columns, facts.longest) == ("acme/riddle", ("riddle", "answer"), 6)
    train, test = ({row["riddle"] for row in read_rows(context.result(port))} for port in ("train", "test"))
    assert train.isdisjoint(test)
    assert prompt_hash({"riddle": "r1", "answer": "x"}, Riddle()) == prompt_hash({"prompt": "r1"}, "prompt")


TRANSCRIPTS = ('"Human: a\n\nAssistant: b"', '"Human: a\n\nAssistant: c"', "2", "3")


@pytest.mark.parametrize(
    ("header", "line", "format", "expected"),
    [
        ("prompt,completion,label", "a,b,TRUE", None, {"label": True}),
        ("prompt,completion,label", "a,b, 0 ", None, {"label": False}),
        ("prompt,completion,label", "a,b,spam", None, {"label": "spam"}),
        ("prompt,completion,score", "a,b,-1.5e1", "scored", {"score": -15.0}),
        ("prompt,completion,score", "a,b,7", "scored", {"score": 7}),
        ("prompt,chosen,rejected,margin", "a,b,c,.5", None, {"margin": 0.5}),
        ("chosen,rejected,margin,n", ",".join(TRANSCRIPTS), None, {"margin": 2, "n": "3"}),
    ],
)  # fmt: skip
def test_numbers_and_truth_values_of_csv_are_what_the_format_says(
    tmp_path: Path, header: str, line: str, format: str | None, expected: dict[str, Any]
) -> None:
    (tmp_path / "rows.csv").write_text(f"{header}\n{line}\n")
    options = {} if format is None else {"format": format}
    (row,) = read_rows(run_stage(Load(), tmp_path, path="rows.csv", **options).result("data"))
    assert {name: row[name] for name in expected} == expected
    assert all(type(row[name]) is type(value) for name, value in expected.items())


@pytest.mark.parametrize(
    ("header", "good", "bad", "format", "told"),
    [
        ("prompt,completion,label", "a,b,true", "a,b,perhaps", None, '`label` is the string "perhaps"'),
        ("prompt,completion,label", "a,b,1", "a,b,2", None, '`label` is the string "2"'),
        ("prompt,completion,score", "a,b,1", "a,b,", "scored", '`score` is the string ""'),
        ("prompt,completion,score", "a,b,1", "a,b,nan", "scored", "`score` is nan"),
        ("prompt,completion,score", "a,b,1", "a,b,1e999", "scored", "`score` is inf"),
        ("prompt,completion,score", "a,b,1", 'a,b,"1,5"', "scored", '`score` is the string "1,5"'),
    ],
)
def test_what_is_none_of_csv_is_refused_by_line_and_column(
    tmp_path: Path, header: str, good: str, bad: str, format: str | None, told: str
) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"{header}\n{good}\n{bad}\n")
    options = {} if format is None else {"format": format}
    (planned,) = Load().check(configured(Load(), path=str(path), **options), {})
    assert f"line 3: {told}" in planned.message
    with pytest.raises(DataError, match="line 3") as caught:
        run_stage(Load(), tmp_path / "load", path=str(path), **options)
    assert told in caught.value.message


def test_csv_columns_can_hold_json(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(
        'q,completion,label,tools\n"[{""role"": ""user"", ""content"": ""a""}]",b,True,\n'
        '"[{""role"": ""user"", ""content"": ""c""}]",d,false,"[{""name"": ""f""}]"\n'
    )
    options = {"columns": {"q": "prompt"}, "json_columns": ["prompt", "label", "tools"]}
    run = run_stage(Load(), tmp_path, path="rows.csv", **options)
    assert read_rows(run.result("data")) == [
        {"prompt": [{"role": "user", "content": "a"}], "completion": "b", "label": True, "tools": None},
        {
            "prompt": [{"role": "user", "content": "c"}],
            "completion": "d",
            "label": False,
            "tools": [{"name": "f"}],
        },
    ]
    assert run.described["data"][1].format == "unpaired_preference"
    path.write_text("prompt\n[1\n")
    with pytest.raises(DataError, match="line 2: `prompt` is not valid JSON"):
        run_stage(Load(), tmp_path / "b", path=str(path), json_columns=["prompt"])


def test_a_limit_and_duplicates_count_what_is_left(tmp_path: Path) -> None:
    rows = [*texts(30), {"text": " "}, *texts(30)]
    rows_file(tmp_path, rows)
    run = run_stage(Load(), tmp_path, path="rows.jsonl", skip_invalid=True, drop_duplicates=True, limit=12)
    kept = [row["text"] for row in read_rows(run.result("data"))]
    assert len(set(kept)) == len(kept) == 12
    assert kept != [f"text {n}" for n in range(12)]
    assert run.notes[1] == "30 rows equal an earlier one: dropped"
    (tmp_path / "b").mkdir()
    rows_file(tmp_path / "b", texts(30)[::-1])
    other = run_stage(Load(), tmp_path / "b", path="rows.jsonl", limit=12)
    assert [row["text"] for row in read_rows(other.result("data"))] == kept[::-1]


PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def test_images_become_files_of_the_dataset(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(base64.b64decode(PIXEL))
    turns = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "a pixel"}]
    rows = [
        {"messages": turns, "image": image} for image in ("pictures/a.png", f"data:image/png;base64,{PIXEL}")
    ]
    path = rows_file(tmp_path, rows)
    config = LoadConfig(path=str(path), images="pictures")
    assert Load().predict(config, {})["data"].facts.rows is None
    assert list(Load().check(config, {})) == []
    run = run_stage(Load(), tmp_path, path="rows.jsonl", images="pictures")
    first, second = read_rows(run.result("data"))
    assert first["images"] == second["images"]
    assert (run.output("data") / first["images"][0]).read_bytes() == base64.b64decode(PIXEL)
    assert first["messages"][0]["content"] == [{"type": "image"}, {"type": "text", "text": "what?"}]
    with pytest.raises(DataError, match="outside of the folder of images"):
        run_stage(Load(), tmp_path / "b", path=str(path))


def test_a_dataset_of_the_hub_can_be_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    rows_file(tmp_path / "data", texts(1000), "train.jsonl")
    run = run_stage(Load(), tmp_path, id=str(tmp_path / "data"), stream=7)
    assert read_rows(run.result("data")) == texts(7)


def test_an_empty_split_is_named(tmp_path: Path) -> None:
    rows_file(tmp_path, texts(3))
    with pytest.raises(DataError, match=r"the split `test` \(0.001 of the rows\) is empty"):
        run_stage(Load(), tmp_path, path="rows.jsonl", split={"test": 0.001})


def test_duplicates_are_noted(tmp_path: Path) -> None:
    rows_file(tmp_path, texts(2) + texts(1))
    assert "1 rows equal an earlier one: kept" in run_stage(Load(), tmp_path, path="rows.jsonl").notes[0]


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({}, "either `path`, a local file, or `id`"),
        ({"path": "a", "id": "b/c"}, "either `path`, a local file, or `id`"),
        ({"path": "a", "revision": "0"}, "belong to a hub `id`"),
        ({"path": "a", "split": {"test": 100}}, "rows would move between splits"),
        ({"path": "a", "split": {"test": 1}}, "must be a fraction below 1"),
        ({"path": "a", "split": {"test": 0.0}}, "must be above 0"),
        ({"path": "a", "split": {"train": 0.9}}, "leave `train` out"),
        ({"path": "a", "split": {"test": 0.6, "dev": 0.4}}, "leaves nothing for `train`"),
        ({"path": "a", "split": {}}, "at least one split"),
        ({"path": "a", "split": {"a.b": 0.5}}, "no name for a split"),
        ({"path": "a", "format": "chatty"}, "format"),
        ({"path": "a", "stream": 5}, "belong to a hub `id`"),
        ({"id": "a/b", "images": "c"}, "the datasets of the hub hold their images"),
        ({"path": "a", "columns": {"x": "z", "y": "z"}}, "one new name to several columns"),
        ({"path": "a", "limit": 0}, "limit"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigProblems) as caught:
        configured(Load(), **options)
    assert part in str([(problem.path, problem.message) for problem in caught.value.problems])


def test_the_path_is_a_source_and_downloading_is_not_in_the_key() -> None:
    config = configured(Load(), path="a.jsonl", download=True)
    assert list(marked(config, SourceMark)) == [(("path",), "a.jsonl")]
    assert not {"path", "download"} & set(semantic(config))


def test_small_text_files_are_read_while_planning(tmp_path: Path) -> None:
    path = rows_file(tmp_path, [{"prompt": f"p{n}", "completion": "c", "answer": "c"} for n in range(40)])
    config = LoadConfig(path=str(path), split={"test": 0.25})
    stage = Load()
    predicted = stage.predict(config, {})
    run = run_stage(stage, tmp_path, path=str(path), split={"test": 0.25})
    for port in ("train", "test"):
        assert predicted[port].facts == run.described[port][1]
        hashes = stage.prompts(config, port, Path("/"))
        assert hashes == {prompt_hash(row, "prompt_completion") for row in read_rows(run.result(port))}
        assert hashes == set((run.output(port) / "prompts.txt").read_text().split())
    assert list(stage.check(config, {})) == []


def test_planning_sees_a_changed_file(tmp_path: Path) -> None:
    path = rows_file(tmp_path, texts(2))
    config = LoadConfig(path=str(path))
    assert Load().predict(config, {})["data"].facts.rows == 2
    rows_file(tmp_path, texts(5))
    assert Load().predict(config, {})["data"].facts.rows == 5


def test_planning_reports_missing_and_broken_files(tmp_path: Path) -> None:
    (missing,) = Load().check(LoadConfig(path=str(tmp_path / "no.jsonl")), {})
    assert (missing.level, missing.certainty) == (Level.ERROR, Certainty.VERIFIED)
    assert str(tmp_path / "no.jsonl") in missing.message
    path = rows_file(tmp_path, [{"text": "a"}, {"txt": "b"}])
    (broken,) = Load().check(LoadConfig(path=str(path)), {})
    assert "line 2: no column `text`" in broken.message
    assert Load().predict(LoadConfig(path=str(path)), {})["data"].facts.rows is None
    assert Load().prompts(LoadConfig(path=str(path)), "data", tmp_path) is None


def test_hub_ids_must_be_pinned() -> None:
    stage = Load()
    assert "pin `revision`" in str(stage.pinned(LoadConfig(id="a/b")))
    assert "pin `revision`" in str(stage.pinned(LoadConfig(id="a/b", revision="main")))
    assert stage.pinned(LoadConfig(id="a/b", revision="0" * 40)) is None
    assert stage.pinned(LoadConfig(path="a.jsonl")) is None


def test_a_hub_dataset_is_not_downloaded_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def refused(*args: Any, **options: Any) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket, "getaddrinfo", refused)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(DataError, match="cannot be read from the local cache") as caught:
        run_stage(Load(), tmp_path, id="nobody/nothing", revision="0" * 40)
    assert "download: true" in str(caught.value.fix)


def test_a_system_prompt_of_which_no_turn_is_made_is_told(tmp_path: Path) -> None:
    pairs = [
        {"system": "Be brief.", "prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": "a", "chosen": "d", "rejected": "e"},
    ]
    rows_file(tmp_path, pairs)
    run = run_stage(Load(), tmp_path, path="rows.jsonl")
    assert "1 rows have a system prompt in `system`, of which no turn is made" in run.notes
    shared = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    rows_file(tmp_path, [{"system": "Be brief.", "conversations": shared}], "shared.jsonl")
    run = run_stage(Load(), tmp_path, path="shared.jsonl")
    assert not any("system" in note for note in run.notes)
