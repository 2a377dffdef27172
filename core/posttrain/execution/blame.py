"""Who is to blame for an exception: the plugin's own frame, in words for people."""

from __future__ import annotations

import errno
import os
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

import posttrain
from posttrain.artifacts.files import guarded
from posttrain.errors import PluginError, PosttrainError, StoreError
from posttrain.registry.extras import extra_with, installing

_CORE = Path(str(posttrain.__file__)).parent
_LIBRARIES = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_INSTALLED = {"site-packages", "dist-packages"}

_STORAGE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})


def explain(error: BaseException, targets: Sequence[str], workspace: Path) -> dict[str, str | None]:
    """Return the parts of an error for `result.json`.

    Args:
        error: What was raised.
        targets: `module:attribute` of the stage and of the components it names, whose packages count as plugins.
        workspace: The place to name when a disk is full.
    """
    if isinstance(error, PosttrainError):
        return error.as_dict()
    if (storage := _storage(error)) is not None:
        return storage_error(storage, workspace).as_dict()
    if isinstance(error, ModuleNotFoundError) and extra_with(error.name) is not None:
        return _not_installed(error, targets).as_dict()
    parts = dict.fromkeys(("type", "message", "where", "found", "expected", "fix"))
    parts.update(type=type(error).__name__, message=_message(error), where=_plugin_frame(error, targets))
    return parts


def storage_error(error: OSError, workspace: Path) -> StoreError:
    """Return an operating-system error as one that names the place and a way out."""
    try:
        with guarded(workspace, "write"):
            raise error
    except StoreError as known:
        return known


def _storage(error: BaseException) -> OSError | None:
    """Return the system's refusal to store something; libraries that are not Python's own only quote its words."""
    if isinstance(error, OSError):
        return error if error.errno in _STORAGE else None
    quoted = (code for code in _STORAGE if os.strerror(code) in str(error))
    return next((OSError(code, os.strerror(code)) for code in quoted), None)


def _not_installed(error: ModuleNotFoundError, targets: Sequence[str]) -> PluginError:
    return PluginError(
        f"{error.name} is not installed",
        where=_plugin_frame(error, targets),
        found=f"the interpreter {sys.executable}",
        fix=installing([str(error.name)]),
    )


def _message(error: BaseException) -> str:
    cause = error.__cause__
    return _own(error) if cause is None else f"{_own(error)} (from {_own(cause).splitlines()[0]})"


def _own(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _plugin_frame(error: BaseException, targets: Sequence[str]) -> str | None:
    """Return `file:line` of the last frame in a plugin's code: the stage's, or that of a component it called."""
    frames = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    roots = [root for root in map(_root, targets) if root is not None]
    chosen = [frame for frame in frames if _is_plugin(frame[0], roots)] or frames
    return f"{chosen[-1][0]}:{chosen[-1][1]}" if chosen else None


def _is_plugin(file: Path, roots: Sequence[Path]) -> bool:
    """Whether a file is in a known plugin, or in neither the core nor a library; `<string>` is no file."""
    if any(file.is_relative_to(root) for root in roots):
        return True
    installed = _INSTALLED.intersection(file.parts) or any(map(file.is_relative_to, (_CORE, *_LIBRARIES)))
    return file.is_absolute() and not installed


def _root(target: str) -> Path | None:
    """Return the directory of the target's package, or the file of a target that is a single module."""
    name = target.partition(":")[0]
    module, package = sys.modules.get(name), sys.modules.get(name.partition(".")[0])
    file = (
        getattr(package, "__file__", None)
        if hasattr(package, "__path__")
        else getattr(module, "__file__", None)
    )
    if file is None:
        return None
    return Path(file).parent if hasattr(package, "__path__") else Path(file)
