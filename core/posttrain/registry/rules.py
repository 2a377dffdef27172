"""The hand-off rules by their codes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from posttrain.contracts.registration import Group
from posttrain.contracts.rule import BUILT_IN, Rule
from posttrain.errors import PluginError, SpecError
from posttrain.registry.catalogue import Catalogue
from posttrain.wording import did_you_mean, listed


@dataclass(frozen=True)
class Ruling:
    """A rule and the name it is registered under."""

    name: str
    rule: type[Rule]
    plugin: str


def rulebook(catalogue: Catalogue) -> dict[str, Ruling]:
    """Return every rule that can be loaded by its code; of two with one code, the built-in or the first by name."""
    names = catalogue.names(Group.RULE)
    names.sort(key=lambda name: not catalogue.entry(Group.RULE, name).plugin.builtin)
    found: dict[str, Ruling] = {}
    for name in names:
        try:
            rule = catalogue.load(Group.RULE, name)
        except PluginError:
            continue  # whoever asks the rule itself is told
        found.setdefault(rule.code, Ruling(name, rule, catalogue.entry(Group.RULE, name).plugin.label))
    return dict(sorted(found.items()))


def ruling(catalogue: Catalogue, code: str) -> Ruling:
    """Return the rule of a code or of a name, however their letters are written.

    Raises:
        SpecError: There is none.
    """
    book = rulebook(catalogue)
    named = {found.name.lower(): own for own, found in book.items()}
    known = named.get(code.lower(), code if code in book else code.upper())
    if known not in book:
        raise SpecError(
            "no rule has this code",
            where="posttrain explain",
            found=code,
            expected=f"one of {listed(book)}",
            fix=did_you_mean(code.upper(), book),
        )
    return book[known]


def require_own_code(catalogue: Catalogue, name: str, book: Mapping[str, Ruling] | None = None) -> type[Rule]:
    """Load a rule whose code nobody else has.

    Args:
        catalogue: The plugins.
        name: The rule's name.
        book: The rulebook, where it is known already.

    Raises:
        PluginError: It cannot be loaded, or its code is that of another rule or has the built-in letters.
    """
    rule: type[Rule] = catalogue.load(Group.RULE, name)
    plugin = catalogue.entry(Group.RULE, name).plugin
    owner = (rulebook(catalogue) if book is None else book)[rule.code]
    if owner.name != name:
        raise PluginError(
            f"the rule {name} of {plugin.label} has the code of the rule {owner.name}",
            where=plugin.origin,
            found=rule.code,
            fix="give it a code of its own, such as `ACME01`",
        )
    if not plugin.builtin and re.fullmatch(rf"{BUILT_IN}[0-9]+", rule.code):
        raise PluginError(
            f"the rule {name} of {plugin.label} has a code that only built-in rules may have",
            where=plugin.origin,
            found=rule.code,
            fix=f"begin its code with other letters than `{BUILT_IN}`, such as `ACME01`",
        )
    return rule
