"""Pipelines of two stages, one of which may fail."""

from __future__ import annotations

from typing import Any

CHAIN: dict[str, Any] = {
    "rows": {"uses": "test/write", "with": {"text": "a"}},
    "more": {"uses": "test/copy", "inputs": {"data": "rows"}, "with": {"text": "b"}},
}


def failing(how: str, **options: Any) -> dict[str, Any]:
    return {
        "rows": {"uses": "test/write"},
        "bad": {"uses": "test/fail", "inputs": {"data": "rows"}, "with": {"how": how, **options}},
    }
