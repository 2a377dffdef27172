"""References between stages: `sft`, `chats.train`, `dpo[*]`, `dpo[seed=1].model`."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from posttrain.errors import SpecError
from posttrain.planning.tree import resolve_plain

NAME = r"[A-Za-z][A-Za-z0-9_-]*"
_REFERENCE = re.compile(rf"(?P<stage>{NAME})(?:\[(?P<selector>[^\[\]]*)\])?(?:\.(?P<port>{NAME}))?")
_EXPECTED = "STAGE, STAGE.PORT, STAGE[*] or STAGE[AXIS=VALUE], such as chats.train, dpo[*], dpo[seed=1]"


def scalar_text(value: str | int | float | bool | None) -> str:
    """Return a matrix value as node names and selectors spell it: text as it is, the rest as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


@dataclass(frozen=True)
class Ref:
    """A reference to outputs of a stage, as written in `inputs`.

    Args:
        stage: The stage's name.
        selector: None when nothing is selected, `"*"` for every node of a matrix, or values of some
            of its axes, as `scalar_text`.
        port: The output port; None when it is left out.
    """

    stage: str
    selector: str | dict[str, str] | None = None
    port: str | None = None

    def __str__(self) -> str:
        chosen = self.selector
        if isinstance(chosen, dict):
            chosen = ",".join(f"{axis}={value}" for axis, value in chosen.items())
        return (
            self.stage
            + (f"[{chosen}]" if chosen is not None else "")
            + (f".{self.port}" if self.port else "")
        )

    def selects(self, axes: dict[str, Any]) -> bool:
        """Whether the node with these matrix values is meant; without a selector every node is."""
        if not isinstance(self.selector, dict):
            return True
        return all(axis in axes and scalar_text(axes[axis]) == text for axis, text in self.selector.items())

    @classmethod
    def parse(cls, text: str) -> Ref:
        """Read a reference.

        Raises:
            SpecError: It does not follow the grammar.
        """
        match = _REFERENCE.fullmatch(text)
        if match is None:
            raise SpecError("this is no reference to a stage", found=repr(text), expected=_EXPECTED)
        return cls(match["stage"], _selector(match["selector"], text), match["port"])


def _selector(text: str | None, whole: str) -> str | dict[str, str] | None:
    if text is None or text == "*":
        return text
    chosen: dict[str, str] = {}
    for part in text.split(","):
        axis, equals, value = (piece.strip() for piece in part.partition("="))
        if not (axis and equals and value):
            raise SpecError("this selector says no AXIS=VALUE", found=repr(whole), expected=_EXPECTED)
        if axis in chosen:
            raise SpecError(f"this selector names `{axis}` twice", found=repr(whole), expected=_EXPECTED)
        try:
            chosen[axis] = scalar_text(resolve_plain(value))
        except ValueError as error:
            raise SpecError(f"this selector holds {error}", found=repr(whole), expected=_EXPECTED) from None
    return chosen
