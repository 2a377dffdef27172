"""Plugins that are installed editably: their version says nothing of their source, so its digest does."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Collection, Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

from posttrain.artifacts.digest import hash_file
from posttrain.errors import PluginError

_DIRECT = "direct_url.json"
_TOP_LEVEL = "top_level.txt"
_COMPILED = "__pycache__"
_METADATA = (".egg-info", ".dist-info")


def project_of(distribution: str | None) -> Path | None:
    """Return the directory that an editable installation is of; None for others."""
    origin, editable = installed_from(distribution)
    return origin if editable else None


def installed_from(distribution: str | None) -> tuple[Path | None, bool]:
    """Return the directory that a distribution was installed from, if it was, and whether editably.

    `pip install` leaves it in `direct_url.json` (PEP 610).
    """
    try:
        told = None if distribution is None else metadata.distribution(distribution).read_text(_DIRECT)
        origin = {} if told is None else json.loads(told)
    except (metadata.PackageNotFoundError, json.JSONDecodeError):
        return None, False
    url = urlsplit(str(origin.get("url", "")))
    if url.scheme != "file" or "dir_info" not in origin:
        return None, False
    return Path(unquote(url.path)).resolve(), bool(origin["dir_info"].get("editable"))


def top_level(distribution: str) -> frozenset[str]:
    """Return the top-level modules that a distribution says it has; none where its build leaves no such list."""
    told = metadata.distribution(distribution).read_text(_TOP_LEVEL)
    return frozenset((told or "").split())


def source_digest(project: Path, used: Collection[str], listed: Collection[str] = ()) -> str:
    """Return the digest of all that can be imported from a project.

    Where its modules lie in a directory of their own, such as `src`, that is everything in it. Where they lie
    beside `pyproject.toml`, it is the modules that are listed, or without a list every one that lies there.

    Args:
        project: The directory of the project.
        used: Names of the top-level modules that registrations name; those of other projects have versions of
            their own.
        listed: Names of all top-level modules of the project, where its distribution says them.

    Raises:
        PluginError: A file cannot be read.
    """
    digest = hashlib.sha256()
    places = _places(project, used, listed)
    for file in sorted({file for place in places for file in _files(place)}):
        if (content := _digest_of(file)) is not None:
            digest.update(f"{file.relative_to(project).as_posix()}\0{content}\n".encode())
    return digest.hexdigest()


def _places(project: Path, used: Collection[str], listed: Collection[str]) -> set[Path]:
    """Return the files and directories of a project whose content can be imported."""
    found = {root for name in {*used, *listed} for root in _roots(name) if root.is_relative_to(project)}
    beside = {root for root in found if root.parent == project}
    everything = {root if root == project else root.parent for root in found - beside}
    if beside and not listed:
        beside |= {
            each for each in project.iterdir() if each.suffix == ".py" or (each / "__init__.py").exists()
        }
    return beside | everything


def _roots(package: str) -> list[Path]:
    """Return the directories of a package, or the file of a module; imports neither."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return []  # a target that cannot be imported is an error of its own, told when it is loaded
    if spec is None:
        return []
    places = spec.submodule_search_locations or ([spec.origin] if spec.origin else [])
    return [Path(place).resolve() for place in places]


def _files(place: Path) -> Iterator[Path]:
    """Yield a file itself, or the files below a directory, without what Python and installers leave there."""
    if not place.is_dir():
        yield place
        return
    for directory, inner, names in os.walk(place, onerror=_unlisted):
        inner[:] = [name for name in inner if name != _COMPILED and not name.startswith(".")]
        inner[:] = [name for name in inner if not name.endswith(_METADATA)]
        yield from (Path(directory, name) for name in names if not name.startswith("."))


def _digest_of(file: Path) -> str | None:
    """Return the digest of a file; None for one that is gone since it was listed, or that is none."""
    try:
        info = file.stat()
        return _digest_at(file, info.st_size, info.st_mtime_ns, info.st_ino) if file.is_file() else None
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(error) from error


@cache
def _digest_at(file: Path, size: int, changed: int, inode: int) -> str:
    """Return the digest of a file, read once in a process as long as it stays as it is."""
    return hash_file(file)


def _unlisted(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise _unreadable(error) from error


def _unreadable(error: OSError) -> PluginError:
    return PluginError(
        "the source of a plugin that is installed editably cannot be read",
        where=None if error.filename is None else str(error.filename),
        found=error.strerror,
        fix="let it be read, or move it out of the plugin's source",
    )
