"""Plugins for tests: written as distributions, as local files, or made in memory."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

import posttrain
from posttrain.contracts.registration import Registration
from posttrain.registry.catalogue import Catalogue
from posttrain.registry.discovery import discover
from posttrain.registry.status import PluginStatus


def plugin(
    name: str = "memory", api: str = ">=1,<2", **registered: Sequence[Registration]
) -> tuple[str, ModuleType]:
    """Make a plugin in memory, such as `plugin(losses=[Registration(...)])`, for `discover(extra=[...])`."""
    module = ModuleType(f"memory_plugin_{name}")
    module.POSTTRAIN_API = api
    for group, registrations in registered.items():
        setattr(module, f"posttrain_{group}", _hook(registrations))
    return name, module


def catalogue_of(**registered: Sequence[Registration]) -> Catalogue:
    """Make a catalogue of nothing but these registrations."""
    catalogue = discover(extra=[plugin(**registered)], installed=False)
    assert catalogue.troubles() == []
    return catalogue


def write_distribution(
    root: Path, distribution: str, source: str, *, entry: str | None = None, module: str | None = None
) -> Path:
    """Write a module and the metadata that makes it an installed plugin once `root` is on the path."""
    module = module or distribution.replace("-", "_")
    file = root / f"{module}.py"
    file.write_text(textwrap.dedent(source), encoding="utf-8")
    info = root / f"{distribution.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    points = f"[posttrain]\n{entry or distribution} = {module}\n"
    (info / "entry_points.txt").write_text(points, encoding="utf-8")
    return file


def install(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the distributions in `root` before all others, and forget their modules afterwards."""
    monkeypatch.setattr(sys, "path", [str(root), *sys.path])
    for file in root.glob("*.py"):  # so that undoing the patch removes the module that a test imports
        monkeypatch.setitem(sys.modules, file.stem, ModuleType("placeholder"))
        del sys.modules[file.stem]
    importlib.invalidate_caches()


def status_of(catalogue: Catalogue, name: str) -> PluginStatus:
    """Return the one plugin of this name."""
    (found,) = [each for each in catalogue.plugins if each.name == name]
    return found


def _hook(registrations: Sequence[Registration]) -> object:
    @posttrain.hookimpl
    def hook() -> Sequence[Registration]:
        return list(registrations)

    return hook
