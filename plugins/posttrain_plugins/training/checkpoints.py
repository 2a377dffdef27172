"""Trainer checkpoints: written whole or not at all, verified before use, and never unpickled.

A checkpoint is a directory of safetensors and JSON files beside a manifest with their digests. It is filled
under a temporary name, forced to disk and renamed, so a crash leaves the earlier ones as they were.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from posttrain.artifacts.digest import hash_file
from posttrain.artifacts.files import sync
from posttrain.contracts.backend import Parallel
from posttrain.errors import StoreError
from posttrain_plugins.backends.single import Single

MANIFEST = "manifest.json"
WEIGHTS = "weights.safetensors"
STATE = "state"
"""The optimizer: as large as the weights, so read once."""
PROGRESS = "progress"
"""Scheduler, loss, evaluation and callbacks, and the metrics not reported yet."""
FINISHED = "finished"
"""Marks a checkpoint from which there is nothing to train."""
NEEDED = "needed"
"""The entry of a manifest with the steps of the checkpoints that are kept with this one."""

_PREFIX = "step-"
_ALONE = Single()


@dataclass(frozen=True)
class Checkpoint:
    """One complete checkpoint: its optimizer step and its directory."""

    step: int
    path: Path

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to train."""
        return (self.path / FINISHED).is_file()


class Checkpoints:
    """The checkpoints of one node, newest first.

    Args:
        directory: Where they live; created when the first one is written.
        limit: How many to keep.
        note: Called with what was skipped and why.
    """

    def __init__(self, directory: Path, limit: int, note: Callable[[str], None]) -> None:
        self.directory, self.limit, self._note = directory, limit, note

    def newest(self) -> Checkpoint | None:
        """Return the newest checkpoint that is complete and undamaged; say which were skipped.

        One that needs another one, which is damaged, is skipped too.
        """
        for step in sorted(self._steps(), reverse=True):
            path = self._path(step)
            problem = damage(path)
            if problem is None:
                broken = [(needed, damage(self._path(needed))) for needed in needs(path)]
                problem = next((f"{self._path(n).name}, which it needs: {p}" for n, p in broken if p), None)
            if problem is None:
                return Checkpoint(step, path)
            self._note(f"checkpoint {path.name} is skipped: {problem}")
        return None

    def at(self, step: int) -> Checkpoint:
        """Return the checkpoint of a step.

        Raises:
            StoreError: It is not there, or damaged.
        """
        path = self._path(step)
        problem = damage(path)
        if problem is not None:
            raise StoreError("the checkpoint cannot be used", where=str(path), found=problem)
        return Checkpoint(step, path)

    def last(self) -> str:
        """Say for people which checkpoint a training that stops now leaves behind."""
        steps = self._steps()
        if not steps:
            return "there is no checkpoint to go back to"
        return f"the last checkpoint, of step {max(steps)}, is kept in {self._path(max(steps))}"

    def write(
        self,
        step: int,
        fill: Callable[[Path], None],
        needed: Sequence[int] = (),
        parallel: Parallel = _ALONE,
    ) -> Checkpoint:
        """Write a checkpoint with what `fill` puts into a fresh directory, then prune.

        Args:
            step: Its step.
            fill: Fills a directory; called on every rank.
            needed: Steps of the checkpoints that are kept as long as this one.
            parallel: The ranks, which fill one directory together.
        """
        target = self._named(step)
        if parallel.rank == 0:
            # What was cut off takes the room that this one may need.
            for unfinished in self.directory.glob(_temporary(f"{_PREFIX}*")):
                _remove(unfinished)
        write_directory(target, fill, needed, parallel)
        if parallel.rank == 0:
            self._prune(step)
        return Checkpoint(step, target)

    def _prune(self, written: int) -> None:
        """Keep the one just written, the newest before it and what these need.

        Later ones were skipped as damaged.
        """
        earlier = sorted((step for step in self._steps() if step < written), reverse=True)
        kept = {written, *earlier[: self.limit - 1]}
        kept |= {step for one in kept for step in needs(self._path(one))}
        for step in set(self._steps()) - kept:
            target = self._named(step)
            _remove(target)
            _remove(target.with_name(_aside(target.name)))

    def _steps(self) -> list[int]:
        if not self.directory.is_dir():
            return []
        whole = [path.name for path in self.directory.glob(f"{_PREFIX}*")]
        aside = [_name_of(path) for path in self.directory.glob(_aside(f"{_PREFIX}*"))]
        names = (name.removeprefix(_PREFIX) for name in {*whole, *aside})
        return [int(name) for name in names if name.isdigit()]

    def _path(self, step: int) -> Path:
        """Return where the checkpoint of a step is: put aside, where whoever was to replace it was killed."""
        target = self._named(step)
        aside = target.with_name(_aside(target.name))
        return aside if aside.is_dir() and not target.is_dir() else target

    def _named(self, step: int) -> Path:
        return self.directory / f"{_PREFIX}{step:08d}"


def write_directory(
    target: Path,
    fill: Callable[[Path], None],
    needed: Sequence[int] = (),
    parallel: Parallel = _ALONE,
) -> None:
    """Create `target` with a manifest, atomically; what stood there before is replaced.

    Args:
        target: The directory.
        fill: Fills it under a temporary name.
        needed: Steps of the checkpoints that it needs beside itself.
        parallel: The ranks, which fill it together; when this returns, it is complete for all of them.
    """
    temporary = target.with_name(_temporary(target.name))
    if parallel.rank == 0:
        _remove(temporary)
        temporary.mkdir(parents=True)
    parallel.barrier()
    try:
        fill(temporary)
        parallel.barrier()
        if parallel.rank == 0:
            _publish(temporary, target, needed)
    except BaseException:
        # A disk that is full stays full, for the journal too, while this lies there. Other ranks may still write to it.
        if parallel.size == 1:
            with suppress(OSError):
                _remove(temporary)
        raise
    parallel.barrier()


def _publish(temporary: Path, target: Path, needed: Sequence[int]) -> None:
    """List what was filled in, force it to disk and give it its name."""
    names = sorted(path.name for path in temporary.iterdir())
    files = {
        name: {"size": (temporary / name).stat().st_size, "sha256": hash_file(temporary / name)}
        for name in names
    }
    (temporary / MANIFEST).write_text(json.dumps({"files": files, NEEDED: list(needed)}, indent=1))
    for name in [*names, MANIFEST]:
        sync(temporary / name)
    sync(temporary)
    replaced = target.with_name(_aside(target.name))
    # What was put aside is all there is until something stands in its place.
    if target.is_dir():
        _remove(replaced)
        target.rename(replaced)
    temporary.rename(target)
    sync(target.parent)
    _remove(replaced)


def _temporary(name: str) -> str:
    """Return the name of a directory that is being filled."""
    return f".{name}.tmp"


def _aside(name: str) -> str:
    """Return the name of a directory that is about to be replaced."""
    return f".{name}.old"


def _name_of(aside: Path) -> str:
    return aside.name.removeprefix(".").removesuffix(".old")


def damage(directory: Path) -> str | None:
    """Say what is wrong with what `write_directory` made: file, expected, found; None when it is sound."""
    problem = damaged_manifest(directory)
    if problem is not None:
        return problem
    for name, entry in json.loads((directory / MANIFEST).read_text())["files"].items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        size = path.stat().st_size
        if size != entry["size"]:
            return f"{name}: expected {entry['size']} bytes, found {size}"
        found = hash_file(path)
        if found != entry["sha256"]:
            return f"{name}: expected sha256 {entry['sha256'][:12]}…, found {found[:12]}…"
    return None


def damaged_manifest(directory: Path) -> str | None:
    """Say what is wrong with a manifest, without a look at the files that it lists."""
    try:
        written = json.loads((directory / MANIFEST).read_text())
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except ValueError:
        return f"{MANIFEST} is not readable"
    complete = isinstance(written, dict) and {"files", NEEDED} <= written.keys()
    return None if complete else f"{MANIFEST} is not readable"


def needs(directory: Path) -> list[int]:
    """Return the steps of the checkpoints that one needs beside itself; none if its manifest is damaged."""
    if damaged_manifest(directory) is not None:
        return []
    found: list[int] = json.loads((directory / MANIFEST).read_text())[NEEDED]
    return found


def save_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write a state dict; a tensor with several names stands under the first of them."""
    first: dict[int, str] = {}
    for name, tensor in weights.items():
        first.setdefault(id(tensor), name)
    save_file({name: tensor for name, tensor in weights.items() if first[id(tensor)] == name}, path)


def load_weights(path: Path, model: torch.nn.Module, parallel: Parallel = _ALONE) -> None:
    """Copy saved weights into the model, of which each rank may hold a part.

    Raises:
        StoreError: The file is no safetensors file, or its names or shapes are not the model's.
    """
    weights = _tensors(path)
    try:
        parallel.load(model, weights)
    except StoreError as error:
        raise StoreError(
            "the checkpoint does not fit the model",
            where=str(path),
            found=error.found,
            expected=error.expected,
        ) from error


def save_state(directory: Path, state: Any, name: str = STATE) -> None:
    """Write nested dicts, lists, tuples, tensors and plain values as `NAME.json` and `NAME.safetensors`."""
    tensors: dict[str, Tensor] = {}
    plain = _pack(state, tensors)
    (directory / f"{name}.json").write_text(json.dumps(plain))
    save_file(tensors, directory / f"{name}.safetensors")


def load_state(directory: Path, name: str = STATE) -> Any:
    """Read what `save_state` wrote.

    Raises:
        StoreError: The files are not JSON and safetensors.
    """
    path = directory / f"{name}.json"
    try:
        return _unpack(json.loads(path.read_text()), _tensors(directory / f"{name}.safetensors"))
    except (ValueError, KeyError) as error:
        raise StoreError(f"the file cannot be read: {error}", where=str(path)) from error


def _tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file into memory of its own: the file may be pruned while the tensors are in use."""
    try:
        return {name: tensor.clone() for name, tensor in load_file(path).items()}
    except SafetensorError as error:
        raise StoreError(f"the file cannot be read: {error}", where=str(path)) from error


def _pack(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        name = f"t{len(tensors)}"
        tensors[name] = value.detach().cpu().clone().contiguous()
        return {"tensor": name}
    if isinstance(value, Mapping):
        return {"dict": [[_pack(key, tensors), _pack(item, tensors)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [_pack(item, tensors) for item in value]}
    if isinstance(value, list):
        return [_pack(item, tensors) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a checkpoint cannot hold a {type(value).__name__}")


def _unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "tuple" in value:
        return tuple(_unpack(item, tensors) for item in value["tuple"])
    return {_unpack(key, tensors): _unpack(item, tensors) for key, item in value["dict"]}


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
