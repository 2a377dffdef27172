"""Who is to blame for an exception: the plugin's own frame, in words for people."""

from __future__ import annotations

import errno
import sys
import sysconfig
import traceback
from pathlib import Path

import posttrain
from posttrain.artifacts.files import guarded
from posttrain.errors import PosttrainError, StoreError

_CORE = Path(str(posttrain.__file__)).parent
_LIBRARIES = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib"))

_STORAGE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})


def explain(error: BaseException, target: str | None, workspace: Path) -> dict[str, str | None]:
    """Return the parts of an error for `result.json`.

    Args:
        error: What was raised.
        target: `module:function` of the stage, whose package counts as the plugin.
        workspace: The place to name when a disk is full.
    """
    if isinstance(error, PosttrainError):
        return error.as_dict()
    if isinstance(error, OSError) and error.errno in _STORAGE:
        return storage_error(error, workspace).as_dict()
    parts = dict.fromkeys(("type", "message", "where", "found", "expected", "fix"))
    parts.update(type=type(error).__name__, message=_message(error), where=_plugin_frame(error, target))
    return parts


def storage_error(error: OSError, workspace: Path) -> StoreError:
    """Return an operating-system error as one that names the place and a way out."""
    try:
        with guarded(workspace, "write"):
            raise error
    except StoreError as known:
        return known


def _message(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _plugin_frame(error: BaseException, target: str | None) -> str | None:
    """Return `file:line` of the last frame in the plugin's own code, else outside of libraries."""
    frames = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    root = _root(target)
    own = [frame for frame in frames if root is not None and frame[0].is_relative_to(root)]
    others = [
        frame for frame in frames if not any(frame[0].is_relative_to(place) for place in (_CORE, *_LIBRARIES))
    ]
    chosen = own or others or frames
    return f"{chosen[-1][0]}:{chosen[-1][1]}" if chosen else None


def _root(target: str | None) -> Path | None:
    """Return the directory of the target's package, or the file of a target that is a single module."""
    name = (target or "").partition(":")[0]
    module, package = sys.modules.get(name), sys.modules.get(name.partition(".")[0])
    file = (
        getattr(package, "__file__", None)
        if hasattr(package, "__path__")
        else getattr(module, "__file__", None)
    )
    if file is None:
        return None
    return Path(file).parent if hasattr(package, "__path__") else Path(file)
