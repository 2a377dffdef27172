"""Plugins that are installed editably: their version says nothing of their source, so its digest does."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Collection, Iterator
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

_DIRECT = "direct_url.json"
_COMPILED = "__pycache__"


def project_of(distribution: str | None) -> Path | None:
    """Return the directory that an editable installation is of; None for others.

    `pip install -e` leaves it in `direct_url.json` (PEP 610).
    """
    try:
        told = None if distribution is None else metadata.distribution(distribution).read_text(_DIRECT)
        origin = {} if told is None else json.loads(told)
    except (metadata.PackageNotFoundError, json.JSONDecodeError):
        return None
    url = urlsplit(str(origin.get("url", "")))
    if url.scheme != "file" or not origin.get("dir_info", {}).get("editable"):
        return None
    return Path(unquote(url.path)).resolve()


def source_digest(project: Path, packages: Collection[str]) -> str:
    """Return the digest of the source files of top-level packages, as far as they lie in the project.

    Args:
        project: The directory of the project.
        packages: Names of top-level modules; those of other projects have versions of their own.
    """
    digest = hashlib.sha256()
    for package in sorted(packages):
        for root in _roots(package):
            if root.is_relative_to(project):
                for name, content in _files(root):
                    digest.update(f"{package}/{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _roots(package: str) -> list[Path]:
    """Return the directories of a package, or the file of a module; imports neither."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return []  # a target that cannot be imported is an error of its own, told when it is loaded
    if spec is None:
        return []
    places = spec.submodule_search_locations or ([spec.origin] if spec.origin else [])
    return sorted(Path(place).resolve() for place in places)


def _files(root: Path) -> Iterator[tuple[str, bytes]]:
    if root.is_file():
        yield root.name, root.read_bytes()
        return
    for file in sorted(root.rglob("*")):
        parts = file.relative_to(root).parts
        hidden = any(part == _COMPILED or part.startswith(".") for part in parts)
        if file.is_file() and not hidden:
            yield "/".join(parts), file.read_bytes()
