from __future__ import annotations

from typing import Any

import pytest

from posttrain import Sample
from posttrain_plugins.rewards.exact import Exact, ExactConfig


@pytest.mark.parametrize(
    ("completion", "row", "options", "score"),
    [
        ("42", {"answer": "42"}, {}, 1.0),
        (" 42\n", {"answer": "42 "}, {}, 1.0),
        (" 42", {"answer": "42"}, {"strip": False}, 0.0),
        ("42", {"answer": 42}, {}, 1.0),
        ("43", {"answer": "42"}, {}, 0.0),
        ("", {"answer": "42"}, {}, 0.0),
        ("42", {"solution": "42"}, {"column": "solution"}, 1.0),
        ("42", {"solution": "42"}, {}, None),
        ("None", {"answer": None}, {}, None),
    ],
)
def test_scores(completion: str, row: dict[str, Any], options: dict[str, Any], score: float | None) -> None:
    assert Exact()([Sample([], completion, row)], ExactConfig(**options)) == [score]


def test_one_score_for_each_sample() -> None:
    assert Exact()([], ExactConfig()) == []
    samples = [Sample([], text, {"answer": "a"}) for text in "aba"]
    assert Exact()(samples, ExactConfig()) == [1.0, 0.0, 1.0]
