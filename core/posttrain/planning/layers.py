"""Layers of options: defaults below, a stage's own on top, and for every value the layer it came from."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from posttrain.planning.source import KeyPath

Origins = dict[KeyPath, KeyPath]
"""Where a merged value was written; it holds for everything below, too."""


def overlay(
    target: dict[str, Any],
    layer: Mapping[str, Any],
    at: KeyPath,
    path: KeyPath,
    origins: Origins,
    *,
    components: bool,
) -> None:
    """Merge `layer` into `target` in place, deeply.

    Mappings are merged key by key, everything else is replaced. With `components`, a mapping of
    another component (`loss: {name: hinge}` over `loss: {name: sigmoid, beta: 0.2}`) replaces it whole.

    Args:
        target: What lies below.
        layer: What lies on top; it is not changed.
        at: Where the layer is written.
        path: Where the target is, in the merged tree.
        origins: Takes the place of every value that came from the layer.
        components: Whether mappings with a `name` are components.
    """
    for key, value in layer.items():
        here, there = (*path, key), (*at, key)
        above = _mergeable(target.get(key), value, components)
        if above is not None:
            overlay(target[key], above, there, here, origins, components=components)
            continue
        for known in [known for known in origins if known[: len(here)] == here]:
            del origins[known]
        target[key] = copy.deepcopy(value)
        origins[here] = there


def _mergeable(below: Any, above: Any, components: bool) -> Mapping[str, Any] | None:
    """Return what of `above` is merged into the mapping `below`; None when `above` replaces it."""
    if not isinstance(below, dict):
        return None
    if components and isinstance(above, str) and below.get("name") == above:
        return {"name": above}
    if not isinstance(above, Mapping):
        return None
    renamed = components and {"name"} <= below.keys() & above.keys() and below["name"] != above["name"]
    return None if renamed else above


def origin_of(path: KeyPath, origins: Origins) -> KeyPath:
    """Return the place in the file of the merged value at `path`."""
    for length in range(len(path), 0, -1):
        if path[:length] in origins:
            return origins[path[:length]] + path[length:]
    return path
