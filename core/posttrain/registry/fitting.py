"""Which components an option takes, and which stages have an option that takes a component."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from posttrain.contracts.component import Uses
from posttrain.contracts.registration import Group
from posttrain.errors import PluginError
from posttrain.registry.catalogue import Catalogue
from posttrain.registry.fields import marks_of


def fits(target: Any, uses: Uses) -> bool:
    """Whether a component has all that an option asks for."""
    return all(getattr(target, attribute, None) == wanted for attribute, wanted in uses.having)


def fitting(uses: Uses, catalogue: Catalogue) -> Iterator[str]:
    """Yield the names of the components that an option takes; broken ones are `plugins check`'s to explain."""
    for name in catalogue.names(uses.group):
        try:
            target = catalogue.load(uses.group, name)
        except PluginError:
            continue
        if fits(target, uses):
            yield name


def takers(target: Any, group: Group, catalogue: Catalogue) -> list[tuple[str, str]]:
    """Return the stages that have an option which takes a component, with that option."""
    found = []
    for name in catalogue.stages():
        try:
            model = catalogue.stage(name).config
        except PluginError:
            continue
        for option, field in model.model_fields.items():
            marks = (*field.metadata, *marks_of(field.annotation))
            found += [
                (name, option)
                for mark in marks
                if isinstance(mark, Uses) and mark.group is group and fits(target, mark)
            ]
    return found


def traits(target: Any, uses: Uses) -> str:
    """Return what of a component an option does not take, such as `family preference`."""
    lacking = [(name, wanted) for name, wanted in uses.having if getattr(target, name, None) != wanted]
    return ", ".join(_trait(name, getattr(target, name, None), wanted) for name, wanted in lacking)


def _trait(name: str, value: Any, wanted: Any) -> str:
    plain = name.replace("_", " ")
    if isinstance(wanted, bool):
        return plain if value else f"not {plain}"
    return f"{plain} {value}, not {wanted}"
