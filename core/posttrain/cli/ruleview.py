"""Hand-off rules, for people: what `posttrain explain H012` and `explain --rules` print."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.cli.output import print_json, say

_CODE = re.compile(r"[A-Za-z]+[0-9]+")
"""Looser than a code is, so that `H1` is taken for a rule."""
_DIGEST = re.compile(r"[0-9a-f]+")


def names_rule(text: str, files: Sequence[Path]) -> bool:
    """Whether a text is the name of a rule, or looks like a code; the letters of `a1b2` may be a digest's."""
    from posttrain.contracts.registration import Group
    from posttrain.registry.discovery import discover

    if _DIGEST.fullmatch(text) is not None:
        return False
    return _CODE.fullmatch(text) is not None or text.lower() in discover(files).names(Group.RULE)


def show_rule(code: str, files: Sequence[Path], as_json: bool) -> None:
    """Print one rule.

    Raises:
        SpecError: There is no rule of that code.
    """
    from posttrain.registry.discovery import discover
    from posttrain.registry.rules import ruling

    found = ruling(discover(files), code)
    rule = found.rule
    if as_json:
        print_json(_as_dict(found))
        return
    say(f"{rule.code} {found.name}: {rule.title} ({rule.level})")
    say(f"\n{rule.text()}\n\nfix: {rule.fix}")


def show_rules(files: Sequence[Path], as_json: bool) -> None:
    """Print every rule on a line of its own."""
    from posttrain.registry.discovery import discover
    from posttrain.registry.rules import rulebook

    book = rulebook(discover(files))
    if as_json:
        print_json([_as_dict(found) for found in book.values()])
        return
    for code, found in book.items():
        say(f"{code:<6} {found.rule.level:<8} {found.name:<26} {found.rule.title}")


def _as_dict(found: Any) -> dict[str, str]:
    rule = found.rule
    return {
        "code": rule.code,
        "name": found.name,
        "title": rule.title,
        "level": rule.level.value,
        "text": rule.text(),
        "fix": rule.fix,
        "plugin": found.plugin,
    }
