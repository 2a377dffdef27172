"""How to install what is missing: an extra of posttrain where one brings it, else the package itself."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import metadata

from posttrain.registry.editable import installed_from


def installing(modules: Iterable[str]) -> str:
    """Return the command that installs modules.

    >>> installing(["wandb", "some_library"])
    "pip install 'posttrain[wandb]' some_library"
    """
    missing = list(dict.fromkeys(modules))
    extras = {module: extra for module in missing if (extra := extra_with(module)) is not None}
    own = [_with_extras(dict.fromkeys(extras.values()))] if extras else []
    return " ".join(["pip install", *own, *(module for module in missing if module not in extras)])


def installing_extra(extra: str) -> str:
    """Return the command that installs an extra of posttrain."""
    return f"pip install {_with_extras([extra])}"


def _with_extras(extras: Iterable[str]) -> str:
    """Return posttrain with extras as pip takes it: from the directory that it was installed from, if it was."""
    directory, editable = installed_from("posttrain")
    kept = directory is not None and directory.is_dir()
    return f"{'-e ' if kept and editable else ''}'{directory if kept else 'posttrain'}[{','.join(extras)}]'"


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
