"""What a training command asks for, and the stages that it comes to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.artifacts.kinds import Kind
from posttrain.errors import SpecError
from posttrain_plugins.commands.origins import DATASETS, LOADERS, MODELS, brought

if TYPE_CHECKING:
    from posttrain.registry.catalogue import Catalogue
    from posttrain_plugins.commands.arguments import Told

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
    cpus: int | None
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
    "cpus": ("cpus", int),
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


def stages_of(
    asked: Asked, trainer: str, catalogue: Catalogue, workspace: Path
) -> tuple[dict[str, Any], list[str]]:
    """Return the stages of the pipeline, and what of the store names of nodes and aliases stand for.

    Raises:
        SpecError: Options are unknown or malformed (all of them are told), or the model or the data is missing.
    """
    from posttrain_plugins.commands.arguments import Told, gathered, misfits
    from posttrain_plugins.commands.synonyms import known, known_options

    model = catalogue.stage(trainer).config
    words, loading = _divided(known(asked.words, model.model_fields, trainer))
    held = known_options(asked.options or {}, model.model_fields, trainer)
    mine = {name: value for name, value in held.items() if _loads(name) is None}
    told = Told()
    loaders = {name: catalogue.stage(LOADERS[kinds]).config for name, kinds in _KINDS.items()}
    chosen = gathered(model, words, catalogue, mine, told)
    given = {}
    for name in _TO:
        own = {option.partition(".")[2]: value for option, value in held.items() if _loads(option) == name}
        inner = Told()
        given[name] = gathered(loaders[name], loading[name], catalogue, own, inner)
        told.take(inner, name)
    _require_named(asked, given, told)
    if told:
        misfits(model, chosen, catalogue, told)
    told.conclude()
    inputs, stages, taken = _brought_in(asked, given, workspace)
    stages[TRAIN] = {"uses": trainer, "inputs": inputs, **({"with": chosen} if chosen else {})}
    resources = {name: value for name in ("cpus", "gpus") if (value := getattr(asked, name)) is not None}
    if resources:
        stages[TRAIN]["resources"] = resources
    if asked.register is not None:
        stages["promote"] = {
            "uses": "promote",
            "inputs": {"model": f"{TRAIN}.model"},
            "with": {"name": asked.register},
        }
    return stages, taken


_TO: Mapping[str, str] = {"model": "train", "dataset": "train on", "eval_dataset": "evaluate on"}
"""What is loaded, and what for."""
_KINDS: Mapping[str, frozenset[Kind]] = {"model": MODELS, "dataset": DATASETS, "eval_dataset": DATASETS}


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


def _require_named(asked: Asked, given: Mapping[str, Mapping[str, Any]], told: Told) -> None:
    """Tell what is not named though it is needed."""
    for name, value in (
        ("model", asked.model),
        ("dataset", asked.dataset),
        ("eval_dataset", asked.eval_dataset),
    ):
        if value is None and (name != "eval_dataset" or given[name]):
            told.add(
                SpecError(
                    f"say which {name} to {_TO[name]}",
                    where=f"--{name}",
                    expected="a path, a hub id as OWNER/NAME, or a name of the store",
                    fix=f"add `--{name} {_EXAMPLES[name]}`",
                )
            )


_EXAMPLES = {"model": "DIRECTORY", "dataset": "ROWS.jsonl", "eval_dataset": "OTHER_ROWS.jsonl"}


def _brought_in(
    asked: Asked, options: Mapping[str, Mapping[str, Any]], workspace: Path
) -> tuple[dict[str, str], dict[str, Any], list[str]]:
    """Return what the training's ports are connected to, the stages that are, and what of the store was taken."""
    stages: dict[str, Any] = {}
    inputs: dict[str, str] = {}
    taken: list[str] = []
    for name, port, text in (
        ("model", "model", asked.model),
        ("dataset", "data", asked.dataset),
        ("eval_dataset", "eval", asked.eval_dataset),
    ):
        given = options[name]
        if text is None:
            continue
        found = brought(str(text), _KINDS[name], workspace, given, asked.download)
        if found.base is not None:
            stages["base"] = found.base
        stages[port], inputs[port] = found.stage, port
        taken += [] if found.taken is None else [f"--{name} {found.taken}"]
        parts = given.get("split")
        if isinstance(parts, Mapping) and parts and name == "dataset":
            inputs |= {"data": "data.train", "eval": f"data.{next(iter(parts))}"}
    return inputs, stages, taken
