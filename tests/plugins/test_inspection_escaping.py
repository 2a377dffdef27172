from __future__ import annotations

import unicodedata
from itertools import pairwise

import pytest
from helpers.looking import HOSTILE
from hypothesis import given
from hypothesis import strategies as st

from posttrain_plugins.inspection.escaping import one_line, parts, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain שלום 👍", "plain שלום 👍"),
        ("line\nbreak\tand tab", "line\nbreak\tand tab"),
        ("\x00", "⟨NUL⟩"),
        ("\x1b[31m", "⟨ESC⟩[31m"),
        ("\r", "⟨CR⟩"),
        ("\x7f\x9b", "⟨U+007F⟩⟨U+009B⟩"),
        ("a\u202eb\u2066c", "a⟨U+202E⟩b⟨U+2066⟩c"),
        ("\u2028\u2029", "⟨U+2028⟩⟨U+2029⟩"),
        ("\ud800", "⟨U+D800⟩"),
        ("\ufeff\u200b", "⟨U+FEFF⟩⟨U+200B⟩"),
        ("\U000e0041", "⟨U+E0041⟩"),
        ("می\u200cخواهم", "می\u200cخواهم"),
        ("👩\u200d🚀", "👩\u200d🚀"),
        ("10\u00a0%", "10\u00a0%"),
    ],
)
def test_what_acts_or_hides_is_named(text: str, shown: str) -> None:
    assert visible(text) == shown


@given(st.text(st.characters()))
def test_nothing_that_acts_is_left(text: str) -> None:
    for character in visible(text):
        assert character in "\n\t" or character in "\u200c\u200d" or unicodedata.category(character)[0] != "C"
        assert character not in "\u2028\u2029"


@given(st.text(st.characters()))
def test_the_parts_are_the_visible_text_and_take_turns(text: str) -> None:
    runs = list(parts(text))
    assert "".join(run for run, _ in runs) == visible(text)
    assert all(one != other for (_, one), (_, other) in pairwise(runs))


def test_hidden_parts_are_told_apart() -> None:
    assert list(parts("a\x00\x1bb\nc")) == [("a", False), ("⟨NUL⟩⟨ESC⟩", True), ("b\nc", False)]


def test_one_line_has_no_break_and_an_end() -> None:
    assert one_line("a\nb\tc") == "a↵b⇥c"
    assert one_line("x" * 300, 10) == "x" * 10 + "…"
    assert one_line("x" * 10, 10) == "x" * 10
    assert "\n" not in one_line(HOSTILE)
