"""The libraries of the extra `flows`."""

from __future__ import annotations

from importlib.util import find_spec

from posttrain.errors import PluginError
from posttrain.registry.extras import installing_extra


def require(library: str) -> None:
    """Check that a library can be imported, without importing it.

    Raises:
        PluginError: It is not installed.
    """
    if find_spec(library) is None:
        raise PluginError(
            f"{library} is not installed",
            fix=f"{installing_extra('flows')}, or choose another runner or tracker",
        )
