"""YAML text to plain data with places."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.errors import SpecError
from posttrain.planning.source import MAX_BYTES, load, problem_at, read
from posttrain.planning.tree import MAX_DEPTH, MAX_VALUES


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("2e-5", 2e-5),
        ("1.", 1.0),
        (".5", 0.5),
        ("+3", 3),
        ("-7", -7),
        ("010", 10),
        ("0o10", 8),
        ("0x1F", 31),
        ("no", "no"),
        ("on", "on"),
        ("yes", "yes"),
        ("y", "y"),
        ("True", True),
        ("false", False),
        ("~", None),
        ("null", None),
        ("2024-01-02", "2024-01-02"),
        ("12:30:45", "12:30:45"),
        ("1_000", "1_000"),
        ('"1"', "1"),
        ("'true'", "true"),
        ("0b11", "0b11"),
        ("3f2c", "3f2c"),
        ("1e5", 1e5),
    ],
)
def test_scalars_follow_the_core_schema(text: str, value: object) -> None:
    found = read(f"a: {text}", "f").data["a"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "where", "says"),
    [
        ("a: .inf", "f:1:4", "not finite"),
        ("a: .NaN", "f:1:4", "not finite"),
        ("a: -1e999", "f:1:4", "too large"),
        ("a: " + "9" * 5000, "f:1:4", "too many digits"),
        ("a: 1\nb: 2\na: 3", "f:3:1", "lines 1 and 3"),
        ("a: &x 1\nb:\n  <<: *x", "f:3:3", "defaults"),
        ("a: !!python/object:os.system x", "f:1:4", "tags are not allowed"),
        ("a: !t x", "f:1:4", "tags are not allowed"),
        ("a: 1\n---\nb: 1", "f:2:1", "second document"),
        ("1: a", "f:1:1", "no text"),
        ("true: a", "f:1:1", "no text"),
        ("? [a]\n: b", "f:1:3", "no text"),
        ("a:\n\tb: 1", "f:2:1", "this is not YAML"),
        ("a: *x", "f:1:4", "no anchor"),
        ("a: &x [*x]", "f:1:8", "inside its own anchor"),
        ("a: '\x07'", "f:1:5", "U+0007"),
        ('a: "\\ud800"', "f:1:4", "surrogate"),
        ("%YAML 1.1\n---\na: 1", "f:2:1", "1.2"),
        ("", "f", "nothing in it"),
        ("# only this\n", "f", "nothing in it"),
        ("---\n", "f", "nothing in it"),
        ("[" * (MAX_DEPTH + 1), f"f:1:{MAX_DEPTH + 1}", "nested too deeply"),
        (f"[{'1,' * MAX_VALUES}]", None, "too many values"),
    ],
)
def test_refusals_have_a_place(text: str, where: str | None, says: str) -> None:
    with pytest.raises(SpecError) as caught:
        read(text, "f")
    assert says in str(caught.value)
    assert where is None or caught.value.where == where


def test_simple_anchors_are_expanded_into_separate_values() -> None:
    source = read("a: &x {k: [1]}\nb: *x\n", "f")
    assert source.data == {"a": {"k": [1]}, "b": {"k": [1]}}
    assert source.data["a"] is not source.data["b"]
    assert str(source.position(("b",))) == "f:2:4"
    assert str(source.position(("b", "k", 0))) == "f:1:12"


def test_an_alias_bomb_is_refused() -> None:
    text = "a0: &a0 [1, 1]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
    with pytest.raises(SpecError, match="too many values"):
        read(text, "f")


def test_aliases_cannot_nest_past_the_limit() -> None:
    text = "a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, MAX_DEPTH + 5))
    with pytest.raises(SpecError, match="nested too deeply"):
        read(text, "f")


def test_positions_of_keys_values_and_missing_paths() -> None:
    source = read("stages:\n  dpo:\n    with: {loss: sigmoid}\n", "p.yaml")
    path = ("stages", "dpo", "with", "loss")
    assert str(source.position(path)) == "p.yaml:3:18"
    assert str(source.position(path, key=True)) == "p.yaml:3:12"
    assert str(source.position((*path[:3], "beta", "x"))) == "p.yaml:3:5"
    assert problem_at(source, path, "bad").where == "p.yaml:3:18"


def test_files_that_cannot_be_read(tmp_path) -> None:
    for content, says in [
        (b"a: \xff", ":1:4"),
        (b"a: b\nc: \xc3(", ":2:4"),
        (b"a" * (MAX_BYTES + 1), "too large"),
    ]:
        (tmp_path / "p.yaml").write_bytes(content)
        with pytest.raises(SpecError, match=says):
            load(tmp_path / "p.yaml")
    with pytest.raises(SpecError, match="no such file"):
        load(tmp_path / "missing.yaml")
    with pytest.raises(SpecError, match="directory"):
        load(tmp_path)


def test_a_byte_order_mark_is_no_content(tmp_path) -> None:
    (tmp_path / "p.yaml").write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert load(tmp_path / "p.yaml").data == {"a": 1}


_SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
_DATA = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=20), inner, max_size=4),
    max_leaves=20,
)


@given(_DATA)
def test_json_is_read_as_it_is(data: object) -> None:
    assert read(json.dumps({"data": data}), "f").data == {"data": data}


_YAMLISH = st.text(alphabet="ab01 \n\t:-?[]{},&*!|>'\"%@#~.<=\\x", max_size=60)


@given(st.binary(max_size=200) | _YAMLISH.map(str.encode))
def test_any_bytes_give_data_or_a_spec_error(tmp_path_factory, raw: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(raw)
    try:
        load(path)
    except SpecError as error:
        assert str(path) in str(error.where)
