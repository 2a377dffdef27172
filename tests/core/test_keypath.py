"""Key paths: what they lead to in nested data."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.keypath import ABSENT, at, numbered
from posttrain.wording import did_you_mean, indefinite, short

DATA: dict[str, Any] = {"rewards": [{"name": "judge", "0": "zero"}], "none": None, "text": "abc"}


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ((), DATA),
        (("rewards", 0, "name"), "judge"),
        (("none",), None),
        (("rewards", 1), ABSENT),
        (("rewards", -1), ABSENT),
        (("rewards", "0"), ABSENT),
        (("text", 0), ABSENT),
        (("gone", "deeper"), ABSENT),
    ],
)
def test_what_a_path_leads_to(path: tuple[str | int, ...], found: Any) -> None:
    assert at(DATA, path) is found or at(DATA, path) == found


def test_numbers_lead_through_lists_alone() -> None:
    assert numbered(DATA, ["rewards", "0", "0"]) == ("rewards", 0, "0")
    assert numbered(DATA, ["gone", "1"]) == ("gone", "1")


def test_words() -> None:
    assert did_you_mean("sigmod", ["hinge", "sigmoid"]) == "did you mean `sigmoid`?"
    assert did_you_mean("x", []) is None
    assert short("x" * 100) == '"' + "x" * 78 + "…"
    assert short(True) == "true"


@pytest.mark.parametrize("noun", ["a model", "an adapter or model", "an image", "a unit"])
def test_a_noun_has_its_article(noun: str) -> None:
    assert indefinite(noun.partition(" ")[2]) == noun
