"""What a training command asks for, and the stages that it comes to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.errors import SpecError

if TYPE_CHECKING:
    from posttrain.registry.catalogue import Catalogue

TRAIN = "train"
"""The stage that trains."""


@dataclass(frozen=True)
class Asked:
    """What a command line and its config file ask for.

    The options of the trainer, and of the stages that load, are left in `words` and `options`.
    """

    model: str | None
    dataset: str | None
    eval_dataset: str | None
    output_dir: Path | None
    register: str | None
    plugins: tuple[str, ...]
    gpus: int | None
    download: bool
    words: tuple[str, ...] = ()
    options: Mapping[str, Any] | None = None


_OF_FILES: Mapping[str, tuple[str, type]] = {
    "model": ("model", str),
    "model_name_or_path": ("model", str),
    "dataset": ("dataset", str),
    "dataset_name": ("dataset", str),
    "eval_dataset": ("eval_dataset", str),
    "output_dir": ("output_dir", str),
    "register": ("register", str),
    "gpus": ("gpus", int),
    "download": ("download", bool),
}
"""Options of the command that a config file may hold: what they are called here, and what they are."""
_WORDING = {str: "text", int: "a whole number", bool: "true or false"}


def with_file(asked: Asked, file: Path | None) -> Asked:
    """Add what a config file holds; the command line beats it."""
    if file is None:
        return asked
    from posttrain.planning.source import load

    held = load(file).data
    if not isinstance(held, Mapping):
        raise SpecError("the file holds no options", where=str(file), expected="a mapping of options")
    own = {}
    for name, value in held.items():
        if name in _OF_FILES and value is not None:
            option, kind = _OF_FILES[name]
            own[option] = _checked(value, kind, f"{file}, {name}")
    if "output_dir" in own:
        own["output_dir"] = Path(own["output_dir"])
    missing = {
        name: value
        for name, value in own.items()
        if getattr(asked, name) is None or getattr(asked, name) is False
    }
    rest = {name: value for name, value in held.items() if name not in _OF_FILES}
    return replace(asked, options=rest, **missing)


def _checked(value: Any, kind: type, where: str) -> Any:
    """Refuse a value of another type: the word `no` would let the network be used."""
    if type(value) is not kind:
        raise SpecError(
            "this value is of another type", where=where, found=repr(value), expected=_WORDING[kind]
        )
    return value


def stages_of(asked: Asked, trainer: str, catalogue: Catalogue, workspace: Path) -> dict[str, Any]:
    """Return the stages of the pipeline."""
    from posttrain_plugins.commands.arguments import options

    words, loading = _divided(asked.words)
    held = asked.options or {}
    inputs, stages = _brought_in(asked, loading, catalogue, workspace)
    stage = catalogue.stage(trainer)
    mine = {name: value for name, value in held.items() if _loads(name) is None}
    chosen = options(stage.config, words, catalogue, mine)
    stages[TRAIN] = {"uses": trainer, "inputs": inputs, **({"with": chosen} if chosen else {})}
    if asked.gpus is not None:
        stages[TRAIN]["resources"] = {"gpus": asked.gpus}
    if asked.register is not None:
        stages["promote"] = {
            "uses": "promote",
            "inputs": {"model": f"{TRAIN}.model"},
            "with": {"name": asked.register},
        }
    return stages


_TO: Mapping[str, str] = {"model": "train", "dataset": "train on", "eval_dataset": "evaluate on"}
"""What is loaded, and what for."""


def _divided(words: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the words of the trainer, and those of the stages that load something, by option."""
    mine: list[str] = []
    loading: dict[str, list[str]] = {name: [] for name in _TO}
    into = mine
    for word in words:
        if word.startswith("--"):
            option = word.removeprefix("--")
            loads = _loads(option)
            into = mine if loads is None else loading[loads]
            into.append(word if loads is None else f"--{option.partition('.')[2]}")
        else:
            into.append(word)
    return mine, loading


def _loads(option: str) -> str | None:
    """Return what an option such as `model.revision` is about; None for those of the trainer."""
    first, dot, _ = option.partition(".")
    name = first.replace("-", "_")
    return name if dot and name in _TO else None


def _brought_in(
    asked: Asked, loading: Mapping[str, Sequence[str]], catalogue: Catalogue, workspace: Path
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return what the training's ports are connected to, and the stages that are."""
    from posttrain_plugins.commands.arguments import options
    from posttrain_plugins.commands.origins import DATASETS, LOADERS, MODELS, stage

    stages: dict[str, Any] = {}
    inputs: dict[str, str] = {}
    for name, port, text, kinds in (
        ("model", "model", asked.model, MODELS),
        ("dataset", "data", asked.dataset, DATASETS),
        ("eval_dataset", "eval", asked.eval_dataset, DATASETS),
    ):
        held = {
            option.partition(".")[2]: value
            for option, value in (asked.options or {}).items()
            if _loads(option) == name
        }
        if text is None and name == "eval_dataset" and not (held or loading[name]):
            continue
        if text is None:
            raise SpecError(f"say which {name} to {_TO[name]}", where=f"--{name}")
        given = options(catalogue.stage(LOADERS[kinds]).config, loading[name], catalogue, held)
        stages[port] = stage(str(text), kinds, workspace, given, asked.download)
        inputs[port] = port
        parts = given.get("split")
        if isinstance(parts, Mapping) and parts and name == "dataset":
            inputs |= {"data": "data.train", "eval": f"data.{next(iter(parts))}"}
    return inputs, stages
