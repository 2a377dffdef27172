"""The line that a refused label is to be mended with gives every label the meaning that it has."""

from __future__ import annotations

import re
from typing import Any

import pytest

from posttrain_plugins.data.formats import format_of
from posttrain_plugins.data.formats.scalars import truth_in

UNPAIRED = format_of("unpaired_preference")
GOOD = (1, 1.0, "1", "true", "True", "TRUE", " true ", "1.0")
BAD = (0, 0.0, "0", "false", "False", "FALSE", "false\n", "0.0")


def refused(label: Any) -> str:
    problem = UNPAIRED.problem({"prompt": "a", "completion": "b", "label": label})
    assert problem is not None
    return problem


@pytest.mark.parametrize("label", [*GOOD[:-1], *BAD[:-1]])
def test_the_line_that_is_suggested_keeps_the_meaning(label: Any) -> None:
    line = re.search(r"in Python: `(.+?)`\)", refused(label))
    assert line is not None
    for each in (*GOOD, *BAD):
        row = {"prompt": "a", "completion": "b", "label": each}
        exec(line[1], {"row": row})
        assert row["label"] is (each in GOOD)
        assert UNPAIRED.problem(row) is None


@pytest.mark.parametrize("label", ["yes", "bad", "", 2, 0.7, -1, ["true"]])
def test_no_meaning_is_guessed(label: Any) -> None:
    problem = refused(label)
    assert "in Python" not in problem
    assert "true for a good answer, false for a bad one" in problem
    line = re.search(r"in Python: `(.+?)`\)", refused("true"))
    assert line is not None
    with pytest.raises(KeyError):
        exec(line[1], {"row": {"label": label}})


def test_what_files_of_texts_are_read_as_agrees() -> None:
    assert [truth_in(str(each)) for each in ("True", "1", "FALSE", "0")] == [True, True, False, False]
