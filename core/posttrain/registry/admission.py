"""Which plugins may be imported at all: the allow and deny lists."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from posttrain.wording import did_you_mean

DISABLE = "POSTTRAIN_DISABLE_PLUGINS"
"""Environment variable: names of plugins or distributions that are not imported, separated by commas."""
ALLOW = "POSTTRAIN_ALLOW_PLUGINS"
"""Environment variable: only these plugins or distributions, and the built-in ones, are imported."""

_CALLER = "the caller"


@dataclass(frozen=True)
class Admission:
    """The lists in force; each name is kept with the place it comes from.

    Args:
        allow: Admitted names by normalized spelling; None admits all.
        deny: Refused names by normalized spelling; a denial outweighs an admission.
    """

    allow: Mapping[str, str] | None
    deny: Mapping[str, str]

    @classmethod
    def read(
        cls, allow: Collection[str] | None, deny: Collection[str], environ: Mapping[str, str]
    ) -> Admission:
        """Combine the caller's lists with the environment's; the caller's allow list replaces that one."""
        refused = _listed(environ.get(DISABLE, "").split(","), DISABLE) | _listed(deny, _CALLER)
        if allow is not None:
            return cls(_listed(allow, _CALLER), refused)
        listed = environ.get(ALLOW)
        return cls(None if listed is None else _listed(listed.split(","), ALLOW), refused)

    def refusal(self, names: Iterable[str], *, builtin: bool) -> str | None:
        """Return why the plugin known by any of `names` is not imported, or None when it is."""
        known = [normalized(name) for name in names]
        for name in known:
            if name in self.deny:
                return f"{name!r} is denied by {self.deny[name]}"
        if builtin or self.allow is None or any(name in self.allow for name in known):
            return None
        return f"not in the allow list of {next(iter(self.allow.values()), ALLOW)}"

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """Return a warning for each listed name that no plugin has."""
        known = {normalized(name) for name in names}
        listed = {**(self.allow or {}), **self.deny}
        unknown = {name: origin for name, origin in listed.items() if name not in known}
        return [
            f"{origin} lists {name!r}, but no plugin has that name" + _in_brackets(did_you_mean(name, known))
            for name, origin in unknown.items()
        ]


def normalized(name: str) -> str:
    """Return the spelling that is compared: lower case, runs of `-`, `_` and `.` as one `-`."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def _in_brackets(text: str | None) -> str:
    return f" ({text})" if text else ""


def _listed(names: Iterable[str], origin: str) -> dict[str, str]:
    return {normalized(name): origin for name in names if name.strip()}
