"""The versions that artifacts are made with: recorded and compared, never part of a key."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from functools import cache
from importlib import metadata

TRACKED = (
    "posttrain",
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "peft",
    "deepspeed",
    "bitsandbytes",
    "tokenizers",
    "safetensors",
    "numpy",
)
"""Distributions whose versions are recorded with every artifact and compared as drift."""


@cache
def current_versions() -> Mapping[str, str]:
    """Return the installed versions of the tracked distributions, read from metadata without importing them."""
    found = {"python": platform.python_version()}
    for name in TRACKED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def drift(made_with: Mapping[str, str]) -> list[str]:
    """Return the versions that differ from those an artifact was made with."""
    now = current_versions()
    return [
        f"{name} {version} → {now[name]}"
        for name, version in sorted(made_with.items())
        if name in now and now[name] != version
    ]
