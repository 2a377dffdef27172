"""How to install what is missing: an extra of posttrain where one brings it, else the package itself."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import metadata


def installing(modules: Iterable[str]) -> str:
    """Return the command that installs modules.

    >>> installing(["wandb", "some_library"])
    "pip install 'posttrain[wandb]' some_library"
    """
    missing = list(dict.fromkeys(modules))
    extras = {module: extra for module in missing if (extra := extra_with(module)) is not None}
    own = [f"'posttrain[{','.join(dict.fromkeys(extras.values()))}]'"] if extras else []
    return " ".join(["pip install", *own, *(module for module in missing if module not in extras)])


def extra_with(module: str | None) -> str | None:
    """Return the extra of posttrain that brings a module, None when none does."""
    try:
        requirements = metadata.requires("posttrain") or []
    except metadata.PackageNotFoundError:
        return None
    found = (re.match(r"([A-Za-z0-9._-]+).*\bextra == [\"'](.+?)[\"']", text) for text in requirements)
    extras = {_normalized(match[1]): match[2] for match in found if match}
    return extras.get(_normalized((module or "").partition(".")[0]))


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
