"""Model files that come inside an installed Python package."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

from posttrain.errors import DataError


def installed_version(package: str) -> str | None:
    """Return the version of the distribution that a top-level module belongs to; None without one."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        owners = importlib.metadata.packages_distributions().get(package, [])
        return importlib.metadata.version(owners[0]) if owners else None


def gguf_of(package: str) -> Path:
    """Return the one GGUF file in a package, which is found without being imported.

    Raises:
        DataError: The package is not installed, or holds no GGUF file or several.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            f"the package `{package}` is not installed",
            fix=f"install it, for example `pip install {package.replace('_', '-')}`",
        )
    folders = [Path(folder) for folder in spec.submodule_search_locations]
    files = sorted(file for folder in folders for file in folder.rglob("*.gguf"))
    if len(files) != 1:
        raise DataError(
            f"the package `{package}` must hold one GGUF file",
            found=", ".join(file.name for file in files) or "none",
            fix="name the file with `gguf`",
        )
    return files[0]


def gguf_of_version(package: str, version: str | None) -> Path:
    """Return the GGUF file of an installed package that is to have a version.

    Raises:
        DataError: Another version is installed, or none, or it holds no such file.
    """
    file, here = gguf_of(package), installed_version(package)
    if here != version:
        raise DataError(
            f"another version of `{package}` is installed than the stage asks for",
            found=here,
            expected=version,
            fix="install that version, or leave `package_version` out",
        )
    return file
