"""What the components of a node need of the machine and of each other."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator

from posttrain.contracts.backend import Backend
from posttrain.contracts.callback import Callback
from posttrain.contracts.registration import Group
from posttrain.contracts.reward import ModelReward
from posttrain.contracts.stage import Certainty, Estimate, Finding, Level
from posttrain.planning.capacity import Machine
from posttrain.planning.nodes import Node
from posttrain.registry.catalogue import Catalogue
from posttrain.registry.components import choices
from posttrain.registry.extras import installing
from posttrain.wording import either, indefinite, listed, size


def shortfalls(node: Node, catalogue: Catalogue) -> Iterator[Finding]:
    """Yield what is missing for the components that a node's options name.

    Libraries are looked for in this interpreter, so nothing is said of a node that has another one.
    """
    for path, choice, group in choices(node.config):
        option = ".".join(map(str, path))
        registration = catalogue.entry(group, choice.name).registration
        missing = [name for name in registration.requires if importlib.util.find_spec(name) is None]
        if missing and node.runtime.python is None:
            message = f"`{choice.name}` needs {listed(missing)}, which is not installed"
            yield _finding(option, message, installing(missing))
        if group is Group.BACKEND:
            yield from _of_backend(option, node, catalogue.make(group, choice.name), choice.config)  # type: ignore[attr-defined]
        if group is Group.CALLBACK:
            callback: Callback = catalogue.make(group, choice.name)
            if not missing and node.runtime.python is None:
                yield from _of_target(option, choice.name, callback.target)
            for problem in callback.problems(choice.config, node.config):  # type: ignore[attr-defined]
                yield _finding(option, problem, None)
        if group is Group.REWARD:
            yield from _of_reward(option, node, choice.name, catalogue.load(group, choice.name))


def _of_target(option: str, name: str, target: str) -> Iterator[Finding]:
    """Yield what is wrong with where a plugin says that its heavy half is."""
    if not _is_there(target.partition(":")[0]):
        message = f"the target of `{name}` is {target}, and there is no such module"
        yield _finding(option, message, 'in a plugin file, write `target = f"{__name__}:NAME"`')


def _is_there(module: str) -> bool:
    """Tell whether a module could be imported, importing at most the packages around it."""
    try:
        return module in sys.modules or importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _of_reward(option: str, node: Node, name: str, reward: object) -> Iterator[Finding]:
    if not (isinstance(reward, type) and issubclass(reward, ModelReward)):
        return
    if not any(port.kinds & reward.models for port in node.plugin.inputs):
        kinds = indefinite(either(reward.models))
        yield _finding(
            option,
            f"reward `{name}` judges with {kinds}, and `{node.uses}` has no input port that takes one",
            f"use a reward that judges without a model, or give the stage an input port `reward` for {kinds}",
        )


def _of_backend(option: str, node: Node, backend: Backend, config: object) -> Iterator[Finding]:
    ranks, gpus = backend.ranks(config), node.resources.gpus
    if 0 < gpus < ranks:
        yield _finding(
            option,
            f"there are {ranks} ranks and {gpus} GPUs, and a rank needs a GPU of its own",
            f"set `resources.gpus` to {ranks}, or `{option}.ranks` to {gpus}",
        )
    if gpus > ranks:
        message = f"there are {gpus} GPUs and {ranks} rank{'s' if ranks > 1 else ''}, which use one each"
        fix = f"set `resources.gpus` to {ranks}, or take a backend with {gpus} ranks"
        yield _finding(option, message, fix, Level.WARNING)
    for problem in backend.problems(config, node.config):
        yield _finding(option, problem, None)


def crowding(node: Node, estimate: Estimate | None, machine: Machine) -> Iterator[Finding]:
    """Yield what a machine lacks for a node: warnings, as a plan may be made where the run is not."""
    for lack in machine.lacks(node.resources):
        message = f"{lack.message}: {lack.asked}, and there are {lack.there}"
        yield _finding(lack.option, message, lack.fix, Level.WARNING)
    needed = estimate.memory_bytes if estimate is not None and not node.resources.gpus else None
    if needed is not None and needed > machine.memory:
        message = f"this machine has {size(machine.memory)}, and up to {size(needed)} may be needed"
        yield _finding(
            "memory", message, "take a smaller model or smaller batches, or another machine", Level.WARNING
        )


def _finding(option: str, message: str, fix: str | None, level: Level = Level.ERROR) -> Finding:
    return Finding("requirements", level, Certainty.VERIFIED, f"{option}: {message}", fix=fix)
