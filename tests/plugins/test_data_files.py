from __future__ import annotations

import csv
from pathlib import Path

import pytest

from posttrain.errors import DataError
from posttrain_plugins.data.judging.cleaning import Cleaned, clean
from posttrain_plugins.data.reading.files import Table, read_table


def written(tmp_path: Path, name: str, content: bytes | str) -> Path:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def cleaned(table: Table, **options: object) -> Cleaned:
    defaults = {"format": None, "columns": {}, "drop_duplicates": False, "limit": None}
    return clean(table, **{**defaults, **options})  # type: ignore[arg-type]


def refusal(path: Path, **options: object) -> str:
    with pytest.raises(DataError) as caught:
        cleaned(read_table(path), **options)
    return str(caught.value)


def test_jsonl_with_byte_order_mark_blank_lines_and_windows_breaks(tmp_path: Path) -> None:
    table = read_table(written(tmp_path, "a.jsonl", b'\xef\xbb\xbf{"text": "a\\u2028"}\r\n\r\n{"text": "b"}'))
    assert table.rows == [{"text": "a\u2028"}, {"text": "b"}]
    assert table.places == ["line 1", "line 3"]


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ('{"text": "a"}\n{"text": "b\n', ["a.jsonl: line 2: invalid JSON"]),
        ('{"text": "a"}\n{"text": "b', ["line 2: invalid JSON", "may have been cut off"]),
        ('{"text": "a"}\n["b"]\n', ["line 2: a row must be a JSON object, not an array"]),
        ('{"text": "a", "x": NaN}\n', ["line 1: invalid JSON: NaN is not JSON"]),
        ('{"text": "a", "x": -Infinity}\n', ["-Infinity is not JSON"]),
        (b'{"text": "a"}\n{"text": "\xff"}\n', ["line 2: byte 11 of the line is not UTF-8 (0xff)"]),
        ("", ["a.jsonl: the file holds no rows"]),
        ("\n\n", ["the file holds no rows"]),
        ('{"text": "a"}\n{"tekst": "b"}\n', ["line 2: no column `text`; the row has `tekst`"]),
        ('{"text": "a"}\n{"text": ["b"]}\n', ["line 2: `text` is list, not a string"]),
        ('{"text": "\\ud800"}\n', ["line 1: `text` holds half a surrogate pair"]),
        ('{"question": "a"}\n', ["fit no dataset format", "`question`", "columns: {question: prompt"]),
        (
            '{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n',
            ["line 2: no column `completion`; the row has `prompt`"],
        ),
        (
            '{"prompt": "a", "completion": "b"}\n{"messages": []}\n',
            ["fit several formats: `prompt_completion`, `messages`", "format: prompt_completion"],
        ),
        (
            '{"prompt": "a"}\n\n{"prompt": [{"role": "user", "content": "a"}]}\n',
            ["line 3: `prompt` is a list, but a string at line 1"],
        ),
        (
            '{"text": "a", "n": null}\n{"text": "b", "n": 1}\n{"text": "b", "n": "1"}\n',
            ["line 3: `n` is a string, but a number at line 2"],
        ),
    ],
)
def test_jsonl_problems_name_the_line(tmp_path: Path, content: str | bytes, parts: list[str]) -> None:
    message = refusal(written(tmp_path, "a.jsonl", content))
    for part in parts:
        assert part in message


def test_many_problems_are_counted_and_the_first_five_shown(tmp_path: Path) -> None:
    message = refusal(written(tmp_path, "a.jsonl", "x\n" * 7 + '{"text": "a"}\n'))
    assert "7 rows cannot be used" in message
    assert "line 5: invalid JSON" in message
    assert "line 6" not in message
    assert "and 2 more" in message


def test_the_format_comes_from_all_rows(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", '{"prompt": "a"}\n' * 50 + '{"prompt": "a", "completion": "b"}\n')
    assert "50 rows cannot be used" in refusal(path)
    assert cleaned(read_table(path), format="prompt").format == "prompt"


def test_json_arrays(tmp_path: Path) -> None:
    assert read_table(written(tmp_path, "a.json", '[{"text": "a"}]')).rows == [{"text": "a"}]
    assert "an object with the keys data" in refusal(written(tmp_path, "b.json", '{"data": []}'))
    assert "row 2 (line 1): a row must be a JSON object, not a string" in refusal(
        written(tmp_path, "c.json", '[{"text": "a"}, "b"]')
    )
    lines = '{"text": "a"}\n{"text": "b"}\n'
    assert "name the file `.jsonl`" in refusal(written(tmp_path, "d.json", lines))


def test_csv(tmp_path: Path) -> None:
    path = written(tmp_path, "a.csv", 'prompt,completion,answer\n"a, b","c\nd",007\n')
    assert read_table(path).rows == [{"prompt": "a, b", "completion": "c\nd", "answer": "007"}]
    assert "line 3: 1 fields, but the header has 2" in refusal(written(tmp_path, "b.csv", "a,b\n1,2\n3\n"))
    assert "names a column twice" in refusal(written(tmp_path, "c.csv", "a,a\n1,2\n"))
    assert "not UTF-8" in refusal(written(tmp_path, "d.csv", b"text\n\xff\xfe\n"))
    assert "holds no rows" in refusal(written(tmp_path, "e.csv", "text\n"))
    assert "invalid CSV" in refusal(written(tmp_path, "f.csv", 'text\n"a"b\n'))


def test_csv_with_blank_lines_and_long_fields(tmp_path: Path) -> None:
    long = "x" * 200_000
    table = read_table(written(tmp_path, "a.csv", f"text,n\n\n{long},1\n\nb,2\n\n"))
    assert table.rows == [{"text": long, "n": "1"}, {"text": "b", "n": "2"}]
    assert table.places == ["line 3", "line 5"]
    assert csv.field_size_limit() == 131072


def test_parquet_arrow_and_saved_datasets(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    made = Dataset.from_list(rows)
    made.to_parquet(str(tmp_path / "a.parquet"))
    made.save_to_disk(str(tmp_path / "saved"))
    DatasetDict({"x": made, "y": made}).save_to_disk(str(tmp_path / "parts"))
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    for path, part in [
        (tmp_path / "a.parquet", None),
        (tmp_path / "saved", None),
        (arrow, None),
        (tmp_path / "parts", "y"),
    ]:
        assert read_table(path, part).rows == rows
    with pytest.raises(DataError, match="several splits") as caught:
        read_table(tmp_path / "parts")
    assert caught.value.found == "x, y"
    assert "not a readable Parquet file" in refusal(written(tmp_path, "b.parquet", b"PAR1"))
    (tmp_path / "empty").mkdir()
    assert "not a saved dataset" in refusal(tmp_path / "empty")


def test_missing_and_unknown_files(tmp_path: Path) -> None:
    assert "there is no such file" in refusal(tmp_path / "no.jsonl")
    assert "cannot read files that end in `.txt`" in refusal(written(tmp_path, "a.txt", "x"))


def test_columns_are_renamed(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", '{"q": "a", "a": "b"}\n')
    assert cleaned(read_table(path), columns={"q": "prompt", "a": "completion"}).rows == [
        {"prompt": "a", "completion": "b"}
    ]
    assert "line 1: no column `question` to rename; the row has q, a" in refusal(
        path, columns={"question": "prompt"}
    )
    assert "would replace the column `a`" in refusal(path, columns={"q": "a"})


def test_columns_can_swap_names(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", '{"prompt": "x", "chosen": "bad", "rejected": "good"}\n')
    swapped = cleaned(read_table(path), columns={"chosen": "rejected", "rejected": "chosen"})
    assert swapped.rows == [{"prompt": "x", "chosen": "good", "rejected": "bad"}]


def test_duplicates_are_counted_and_dropped_when_asked(tmp_path: Path) -> None:
    path = written(
        tmp_path, "a.jsonl", '{"text": "a", "n": 1}\n{"n": 1, "text": "a"}\n{"text": "b", "n": 1}\n'
    )
    kept = cleaned(read_table(path))
    assert (len(kept.rows), kept.duplicates) == (3, 1)
    assert [row["text"] for row in cleaned(read_table(path), drop_duplicates=True).rows] == ["a", "b"]


def test_a_limit_chooses_by_content_not_by_place(tmp_path: Path) -> None:
    rows = [{"text": str(n)} for n in range(40)]
    places = [f"row {n}" for n in range(40)]
    forward = cleaned(Table("t", rows, places), limit=10).rows
    backward = cleaned(Table("t", rows[::-1], places), limit=10).rows
    assert len(forward) == 10
    assert forward == backward[::-1]
    assert forward != rows[:10]
