from __future__ import annotations

from array import array
from typing import Any

from helpers.looking import turns

from posttrain.contracts.trainer import Example, TokenSequence
from posttrain_plugins.data.formats import format_of
from posttrain_plugins.inspection.statistics import Census, Sizes, Statistics


def counted(format: str, rows: list[dict[str, Any]], sizes: Sizes | None = None) -> Statistics:
    census, form = Census(format), format_of(format)
    for row in rows:
        census.add(row, form.passages(row))
    return census.statistics(sizes)


def test_a_conversation_dataset_by_hand() -> None:
    rows = [
        {"messages": turns("Hi", "Hello"), "source": "web"},
        {"messages": turns("Hi", "Hello"), "source": "web"},
        {"messages": turns("Hi", "Good day", "And?", "Bye.")},
        {"messages": [{"role": "system", "content": "Be brief."}, *turns("Hi", "Hello")]},
    ]
    found = counted("messages", rows)
    assert (found.rows, found.format, found.columns) == (4, "messages", {"messages": 4, "source": 2})
    assert found.roles == {"user": 5, "assistant": 5, "system": 1}
    assert found.conversations == 4
    assert found.equal == 1
    # The last question of the third row and the system turn of the fourth make other prompts.
    assert found.asked == 1
    assert found.characters is not None and found.turns is not None
    assert (found.characters.least, found.characters.most) == (7, 18)
    assert (found.turns.least, found.turns.most) == (2, 4)
    assert [(row.number, row.characters) for row in found.longest] == [(3, 18), (4, 16), (1, 7), (2, 7)]
    assert found.as_dict()["equal_rate"] == 0.25


def test_a_shared_prompt_counts_once() -> None:
    row = {"prompt": turns("1234"), "chosen": turns("", "ab")[1:], "rejected": turns("", "xyz")[1:]}
    found = counted("preference", [row])
    assert found.characters is not None and found.turns is not None
    assert (found.characters.most, found.turns.most) == (9, 3)


def test_strings_are_no_turns() -> None:
    found = counted("prompt_completion", [{"prompt": "2+2=", "completion": "4"}])
    assert found.turns is None
    assert found.conversations == 0
    assert found.tokens is None


def test_tools_and_images_are_counted() -> None:
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {}}}
    rows = [
        {"messages": turns("a", "b"), "tools": [tool]},
        {"messages": turns("a", "c"), "images": ["x.png"]},
        {"messages": turns("a", "d"), "tools": []},
    ]
    found = counted("messages", rows)
    assert (found.tools, found.images) == (1, 1)


def test_tokens_by_hand() -> None:
    sizes = Sizes()
    for row, (length, learned) in enumerate([(10, 5), (30, 3)]):
        mask = bytes(length - learned) + b"\1" * learned
        sizes.add(Example(row, (TokenSequence(array("i", range(length)), mask, "completion"),)))
    found = counted("text", [{"text": "ab"}, {"text": "abc"}], sizes)
    assert found.tokens is not None
    assert found.tokens.total == 40
    assert found.tokens.supervised == 8 / 40
    assert found.tokens.length is not None and found.tokens.share is not None
    assert (found.tokens.length.least, found.tokens.length.most) == (10, 30)
    assert (found.tokens.share.least, found.tokens.share.most) == (10, 50)
    assert [(row.number, row.tokens) for row in found.longest] == [(2, 30), (1, 10)]
