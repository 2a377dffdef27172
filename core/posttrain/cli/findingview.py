"""What the hand-off rules say of a plan, for people: errors first, and each thing once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text

from posttrain.cli.output import console, printable
from posttrain.contracts.stage import Certainty, Finding, Level

_LEVELS = {Level.ERROR: "red", Level.WARNING: "yellow", Level.NOTE: "dim"}
_NO_ACTION = re.compile(r"nothing\b")
"""How the fix of a note begins that asks for none."""
_REFERENCE = re.compile(r"\S+\.\S*\w")
"""What names a port of a node, or a figure, in a message: findings that differ there alone are of one shape."""


@dataclass
class _Group:
    """Findings that are told in one line."""

    first: Finding
    places: dict[str, None] = field(default_factory=dict)
    messages: dict[str, None] = field(default_factory=dict)

    def add(self, finding: Finding) -> None:
        at = f"{finding.node}.{finding.port}" if finding.port else str(finding.node)
        self.places.setdefault(at)
        self.messages.setdefault(finding.message)

    @property
    def text(self) -> str:
        more = len(self.messages) - 1
        others = f" (and {more} more like it)" if more else ""
        return f"{', '.join(self.places)}: {self.first.message}{others} [{self.first.label}]"

    @property
    def fix(self) -> str | None:
        fix = self.first.fix
        idle = self.first.level == Level.NOTE and fix is not None and _NO_ACTION.match(fix)
        return None if idle else fix


def show_findings(findings: Iterable[Finding]) -> None:
    """Print findings by how much they matter, those that are alike in one line with all the places they are about."""
    groups = _grouped(findings)
    if groups:
        console().print("\nhand-offs", style="bold")
    for group in groups:
        line = Text(f"  {group.first.level.value:<8}", style=_LEVELS[group.first.level])
        line.append(f"{group.first.certainty.value:<10}", style="dim")
        line.append(printable(group.text), style="default not dim")
        console().print(line)
        if group.fix:
            console().print(Text(f"{'':<20}fix: {printable(group.fix)}", style="dim"))


def _grouped(findings: Iterable[Finding]) -> Sequence[_Group]:
    groups: dict[tuple[Any, ...], _Group] = {}
    for finding in findings:
        groups.setdefault(_kind(finding), _Group(finding)).add(finding)
    ranks = list(_LEVELS)
    return sorted(groups.values(), key=lambda group: ranks.index(group.first.level))


def _kind(finding: Finding) -> tuple[Any, ...]:
    """Return what findings of one line have in common: of errors and warnings every word, of notes the shape."""
    own = (finding.level, finding.certainty, finding.label, finding.fix)
    if finding.level != Level.NOTE:
        return (*own, finding.message)
    if finding.certainty == Certainty.UNKNOWN:
        return own
    return (*own, _REFERENCE.sub("…", finding.message))
