"""Files that are broken, huge, hostile or merely strange: each is named with its place, none crashes anything."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers.evaluation import dataset
from helpers.stages import run_stage

from posttrain.errors import DataError
from posttrain_plugins.data.formats import format_of
from posttrain_plugins.data.judging.cleaning import Cleaned, clean
from posttrain_plugins.data.judging.validation import inspect_file
from posttrain_plugins.data.load import Load
from posttrain_plugins.data.mix import Mix
from posttrain_plugins.data.reading import jsonl, lines
from posttrain_plugins.data.reading.files import open_file, read_table
from posttrain_plugins.data.rows import read_rows
from posttrain_plugins.data.validate import ValidateConfig, checks_of

MIB = 1024**2


def written(tmp_path: Path, name: str, content: bytes | str) -> Path:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def cleaned(path: Path, **options: Any) -> Cleaned:
    defaults = {"format": None, "columns": {}, "drop_duplicates": False, "limit": None}
    return clean(open_file(path), **{**defaults, **options})


def refusal(path: Path, **options: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        cleaned(path, **options)
    return caught.value


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv"])
def test_a_line_of_two_gigabytes_fails_fast_in_little_memory(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    with path.open("wb") as file:
        file.write(b'[{"text": "' if suffix == "json" else b'{"text": "')
        file.truncate(2 * 1024 * MIB)
    tracemalloc.start()
    try:
        message = str(refusal(path))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert str(path) in message
    assert "line 1" in message
    assert peak < 220 * MIB


def test_the_longest_row_of_an_array_is_bounded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import posttrain_plugins.data.reading.json_array as json_array

    monkeypatch.setattr(json_array, "LONGEST", 2 * MIB)
    long = json.dumps([{"text": "a"}, {"text": "b" * 9 * MIB}])
    error = refusal(written(tmp_path, "a.json", long))
    assert "the row that begins on line 1 is longer than" in error.message
    rows = [{"text": "b" * (MIB + number)} for number in range(4)]
    assert read_table(written(tmp_path, "b.json", json.dumps(rows))).rows == rows


def test_a_long_line_names_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "LONGEST", MIB)
    error = refusal(written(tmp_path, "a.jsonl", '{"text": "a"}\n{"text": "' + "b" * MIB + '"}\n'))
    assert error.message == "line 2 is longer than 1 MiB, the most that is read at once"


BEGINNINGS: Mapping[str, tuple[bytes, str]] = {
    "gzip": (b"\x1f\x8b\x08\x00" + bytes(range(64)), "gzip-compressed"),
    "zip": (b"PK\x03\x04" + bytes(range(64)), "a ZIP archive"),
    "parquet": (b"PAR1" + bytes(range(64)), "a Parquet file"),
    "utf16": ('{"text": "a"}\n'.encode("utf-16"), "text in UTF-16"),
    "zstd": (b"\x28\xb5\x2f\xfd" + bytes(range(64)), "Zstandard"),
}


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv"])
@pytest.mark.parametrize("kind", BEGINNINGS)
def test_files_that_are_no_text_are_called_what_they_are(tmp_path: Path, kind: str, suffix: str) -> None:
    content, told = BEGINNINGS[kind]
    error = refusal(written(tmp_path, f"a.{suffix}", content))
    assert told in error.message
    assert error.fix is not None


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet", "arrow"])
def test_garbage_is_refused_by_name(tmp_path: Path, suffix: str) -> None:
    garbage = bytes((number * 167 + 13) % 256 for number in range(5000))
    error = refusal(written(tmp_path, f"a.{suffix}", garbage))
    assert f"a.{suffix}" in str(error)
    assert len(str(error)) < 2000


PLACES = [
    ("a.jsonl", b'{"text": "a"}\n{"text": "b", }\n', ["line 2: invalid JSON", "at column 15"]),
    ("a.jsonl", '{"text": "ä😀"} x\n', ["line 1: invalid JSON: something follows the object at column 15"]),
    ("a.jsonl", b'{"text": "a\x00b"}\n', ["line 1: invalid JSON", "column 12", "'\\x00'"]),
    ("a.jsonl", b'{"text": "a"}\n' + b"\x00" * 50, ["line 2: invalid JSON", "may have been cut off"]),
    ("a.jsonl", b'{"text": "\xc3\x28"}\n', ["line 1: byte 11 of the line is not UTF-8 (0xc3)"]),
    (
        "a.jsonl",
        b'{"text": ' + b"[" * 200_000 + b"\n",
        ["line 1: invalid JSON: values are nested too deeply"],
    ),
    ("a.jsonl", b'{"text": "a", "n": ' + b"9" * 5000 + b"}\n", ["line 1: invalid JSON"]),
    ("a.jsonl", '{"text": "a", "b": "\\udc00"}\n', ["line 1: `b` holds half a surrogate pair", "\\udc00"]),
    ("a.jsonl", '{"text": "a"}\n{"text": null}\n', ["line 2: `text` is null, not a string"]),
    ("a.json", '[{"text": "a"},\n {"text": "b" "c"}]', ["a.json, line 2, column 15", "invalid JSON"]),
    ("a.json", '[{"text": "a"},\n', ["a.json, line 2", "the end of the file", "cut off"]),
    ("a.json", '[{"text": "a"}] {}', ["line 1, column 17", "something follows the array"]),
    ("a.json", '[{"text": "a"}\n\n, 3]', ["row 2 (line 3): a row must be a JSON object, not a number"]),
    ("a.json", b'[{"text": "\xff"}]', ["byte 12 is not UTF-8 (0xff)"]),
    ("a.json", '[{"text": NaN}]', ["NaN is not JSON", "line 1"]),
    ("a.json", "[" * 200_000, ["nested too deeply"]),
    ("a.csv", b"text\nok\n\xff\n", ["line 3", "byte 1 of the line is not UTF-8 (0xff)"]),
    ("a.csv", "text,label\na,b,c\n", ["line 2: 3 fields, but the header has 2"]),
    ("a.csv", 'text\n"a\n\n', ["invalid CSV: unexpected end of data", "line"]),
]


@pytest.mark.parametrize(("name", "content", "parts"), PLACES)
def test_what_is_wrong_is_told_with_its_place(
    tmp_path: Path, name: str, content: str | bytes, parts: list[str]
) -> None:
    message = str(refusal(written(tmp_path, name, content)))
    assert name in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_byte_order_marks_and_windows_breaks_change_nothing(tmp_path: Path, suffix: str) -> None:
    text = '{"text": "a\\r\\nb"}' if suffix == "jsonl" else '[\r\n{"text": "a\\r\\nb"}\r\n]'
    marked = written(tmp_path, f"a.{suffix}", b"\xef\xbb\xbf" + text.encode() + b"\r\n")
    assert read_table(marked).rows == [{"text": "a\r\nb"}]


STRANGE = {
    "right to left": "\u202eשלום עולם\u202c مرحبا",
    "emoji": "👩‍👩‍👧‍👦 👋🏽 🏳️‍🌈",
    "separators": "a\u2028b\u2029c\u0085d",
    "NUL": "a\x00b",
    "combining": "e\u0301" * 5,
    "no token": "a" * MIB,
    "brackets": '{"text": [}]',
}


@pytest.mark.parametrize("name", STRANGE)
def test_strange_texts_come_through_unchanged(tmp_path: Path, name: str) -> None:
    text = STRANGE[name]
    for ascii_only in (True, False):
        line = json.dumps({"prompt": text, "completion": text}, ensure_ascii=ascii_only)
        for suffix, content in (("jsonl", line + "\n"), ("json", f"[{line}]")):
            path = written(tmp_path, f"a.{suffix}", content)
            run = run_stage(Load(), tmp_path / suffix, path=str(path))
            assert read_rows(run.result("data")) == [{"prompt": text, "completion": text}]
            assert run.described["data"][1].longest == 2 * len(text)


def test_a_whole_pair_of_surrogates_is_text(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", '{"text": "\\ud83d\\ude00"}\n')
    assert cleaned(path).rows == [{"text": "😀"}]


def test_large_files_are_read_a_row_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("w") as file:
        for number in range(4000):
            file.write(json.dumps({"text": f"{number} " + "x" * 10_000}) + "\n")
    tracemalloc.start()
    try:
        run = run_stage(Load(), tmp_path, path="a.jsonl")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert run.described["data"][1].rows == 4000
    assert peak < 8 * MIB < path.stat().st_size / 4


def test_rows_that_do_not_suit_can_be_left_out_and_are_counted(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", '{"text": "a"}\n{"text": " "}\n{"text": "\\ud800"}\n{"text": "b"}\n')
    run = run_stage(Load(), tmp_path, path=str(path), skip_invalid=True)
    assert [row["text"] for row in read_rows(run.result("data"))] == ["a", "b"]
    assert "2 rows left out: line 2: `text` is empty; line 3" in run.notes[0]
    nothing = written(tmp_path, "b.jsonl", '{"text": " "}\n')
    with pytest.raises(DataError, match="no row of `text` was left"):
        run_stage(Load(), tmp_path, path=str(nothing), skip_invalid=True)


def tool(name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


ANSWER = {"role": "assistant", "content": "b"}


def test_f061_tools_survive_what_arrow_does_to_structs(tmp_path: Path) -> None:
    from datasets import Dataset

    tools = [
        tool("f", {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}),
        tool("g", {"type": "object", "properties": {"unit": {"enum": ["a", None]}}}),
    ]
    call = {"type": "function", "function": {"name": "f", "arguments": {"city": "x"}}}
    other = {"type": "function", "function": {"name": "g", "arguments": {"unit": "a"}}}
    rows = [
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": None, "tool_calls": [call, other]},
                {"role": "tool", "content": "9", "name": "f"},
                ANSWER,
            ],
            "tools": tools,
            "chat_template_kwargs": {"enable_thinking": False},
        },
        {
            "messages": [{"role": "user", "content": "a"}, ANSWER],
            "tools": None,
            "chat_template_kwargs": {"effort": "low"},
        },
    ]
    made = Dataset.from_list(rows)
    assert made[0]["tools"][1]["function"]["parameters"]["properties"]["city"] is None
    made.to_parquet(str(tmp_path / "a.parquet"))
    made.save_to_disk(str(tmp_path / "saved"))
    for path in (tmp_path / "a.parquet", tmp_path / "saved"):
        found = cleaned(path).rows
        assert found == rows
        before, after = (format_of("messages").passages(each)[0] for each in (rows[0], found[0]))
        assert before == after


def test_f061_meant_nulls_survive_as_json_text(tmp_path: Path) -> None:
    from datasets import Dataset

    tools = [
        tool("f", {"properties": {"a": {"default": None}}}),
        tool("g", {"properties": {"b": {"enum": [None]}}}),
    ]
    row = {"messages": [{"role": "user", "content": "a"}, ANSWER], "tools": json.dumps(tools)}
    Dataset.from_list([row]).to_parquet(str(tmp_path / "a.parquet"))
    (found,) = cleaned(tmp_path / "a.parquet").rows
    assert format_of("messages").passages(found)[0].tools == tools


def test_nulls_in_json_lines_are_never_touched(tmp_path: Path) -> None:
    tools = [tool("f", {"properties": {"a": {"default": None}}})]
    row = {"messages": [{"role": "user", "content": "a", "name": None}, ANSWER], "tools": tools}
    assert cleaned(written(tmp_path, "a.jsonl", json.dumps(row))).rows == [row]


@pytest.mark.parametrize("tools", [None, [], "", "[]", "null"])
def test_f062_no_tools_are_no_tools(tools: Any) -> None:
    row = {"prompt": "a", "tools": tools}
    assert format_of("prompt").passages(row) == format_of("prompt").passages({"prompt": "a"})


def test_f064_mixtures_keep_their_shares_and_their_rows(tmp_path: Path) -> None:
    parts = {
        name: [{"text": f"{name}{number}"} for number in range(size)]
        for name, size in (("a", 3000), ("b", 9000))
    }
    inputs = {"data": [dataset(tmp_path / name, rows, "text") for name, rows in parts.items()]}
    run = run_stage(Mix(), tmp_path, inputs, weights=[0.25, 0.75], rows=10_000)
    texts = [row["text"] for row in read_rows(run.result("data"))]
    assert abs(sum(text.startswith("a") for text in texts) / len(texts) - 0.25) < 1e-9
    assert len(set(texts)) == len(texts)
    whole = run_stage(Mix(), tmp_path / "whole", inputs)
    union = sorted(row["text"] for rows in parts.values() for row in rows)
    mixed = [row["text"] for row in read_rows(whole.result("data"))]
    assert sorted(mixed) == union != mixed


CODE = """
import sys
from pathlib import Path
from posttrain_plugins.data.judging.validation import inspect_file
from posttrain_plugins.data.validate import ValidateConfig, checks_of
print(len(inspect_file(Path(sys.argv[1]), None, checks_of(ValidateConfig())).problems))
heavy = {"torch", "transformers", "numpy", "datasets", "pyarrow"} & set(sys.modules)
assert not heavy, heavy
"""


def test_text_files_are_validated_without_any_library(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", '{"text": "a"}\n{"text": "</s>"}\n')
    run = subprocess.run([sys.executable, "-c", CODE, str(path)], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout.strip()) == (0, "1"), run.stderr


def test_every_bad_line_is_counted(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", "".join(f'{{"text": "{n}"}}\n{{"text": {n}\n' for n in range(50)))
    unreadable = inspect_file(path, None, checks_of(ValidateConfig())).problems[0]
    assert (unreadable.code, unreadable.count) == ("unreadable", 50)
    assert [place for place, _ in unreadable.examples] == [f"line {2 * n + 2}" for n in range(5)]
    assert list(jsonl.read(written(tmp_path, "b.jsonl", '{"text": "a"}'))) == [("line 1", {"text": "a"})]
