"""What is asked of plugins while planning. Whatever one of them raises names the plugin and the place in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from posttrain.contracts.registration import Group
from posttrain.contracts.rule import Site
from posttrain.contracts.stage import Estimate, Finding, Input, Inputs, Port, Prediction
from posttrain.errors import PluginError, PosttrainError
from posttrain.planning.nodes import Node
from posttrain.registry.catalogue import Catalogue
from posttrain.registry.isolation import Failure, isolated

T = TypeVar("T")


def outputs_of(node: Node, catalogue: Catalogue) -> tuple[Port, ...]:
    """Return the output ports of a node. Raises as every question here: `PluginError` for what is not its own."""
    return _stage(node, catalogue, "outputs", lambda: _all_of(Port, node.outputs()))


def shrinkage(node: Node, catalogue: Catalogue) -> Mapping[str, Any]:
    """Return what a smoke run overlays on a node's options."""
    return _stage(node, catalogue, "shrink", lambda: dict(node.plugin.shrink(node.config)))


def predictions(node: Node, inputs: Inputs, catalogue: Catalogue) -> Mapping[str, Prediction]:
    """Return what a node expects to put out, by port."""

    def predict() -> Mapping[str, Prediction]:
        found = dict(node.plugin.predict(node.config, inputs))
        _all_of(Prediction, found.values())
        return found

    return _stage(node, catalogue, "predict", predict)


def objections(node: Node, inputs: Inputs, catalogue: Catalogue) -> tuple[Finding, ...]:
    """Return what the stage itself finds wrong with a node."""
    return _stage(node, catalogue, "check", lambda: _all_of(Finding, node.plugin.check(node.config, inputs)))


def verdicts(rule: str, site: Site, catalogue: Catalogue) -> tuple[Finding, ...]:
    """Return what a hand-off rule finds at a node."""
    made = catalogue.make(Group.RULE, rule)
    return _asked(
        f"the rule {rule} of {catalogue.entry(Group.RULE, rule).plugin.label}",
        f"at {site.node}",
        made,
        lambda: _all_of(Finding, made.check(site)),
    )


def estimate_of(node: Node, inputs: Inputs, catalogue: Catalogue) -> Estimate | None:
    """Return what a node is expected to need."""

    def estimate() -> Estimate | None:
        found = node.plugin.estimate(node.config, inputs, node.resources.gpus)
        return None if found is None else _all_of(Estimate, [found])[0]

    return _stage(node, catalogue, "estimate", estimate)


def movement(node: Node, catalogue: Catalogue) -> str | None:
    """Return why a node's options do not determine its outputs."""
    return _stage(node, catalogue, "pinned", lambda: node.plugin.pinned(node.config))


def lapse(
    node: Node, inputs: Mapping[str, Sequence[Input]], workspace: Path, catalogue: Catalogue
) -> str | None:
    """Return why an effect outside the store is not in place any more."""
    return _stage(node, catalogue, "holds", lambda: node.plugin.holds(node.config, inputs, workspace))


def prompts_of(node: Node, port: str, base: Path, catalogue: Catalogue) -> frozenset[str] | None:
    """Return the prompt hashes of a dataset output, where they can be told already."""
    return _stage(node, catalogue, "prompts", lambda: node.plugin.prompts(node.config, port, base))


def _all_of(kind: type[T], found: Any) -> tuple[T, ...]:
    items = tuple(found)
    for item in items:
        if not isinstance(item, kind):
            raise TypeError(f"it gave a {type(item).__name__} where a {kind.__name__} was expected")
    return items


def _stage(node: Node, catalogue: Catalogue, question: str, call: Callable[[], T]) -> T:
    label = catalogue.entry(Group.STAGE, node.uses).plugin.label
    return _asked(f"`{question}` of the stage {node.uses} of {label}", f"at {node.name}", node.plugin, call)


def _asked(what: str, at: str, plugin: object, call: Callable[[], T]) -> T:
    """Return what a call into a plugin returns; posttrain's own errors pass as they are.

    Raises:
        PluginError: It raised anything else, exited, or gave something that it must not give.
    """
    own: list[PosttrainError] = []

    def attempt() -> T:
        try:
            return call()
        except PosttrainError as error:
            own.append(error)
            raise

    package = type(plugin).__module__.partition(".")[0]
    result = isolated(f"{what} {at}", package, attempt, redirect=False)
    if own:
        raise own[0]
    if isinstance(result, Failure):
        raise PluginError(
            f"{what} failed {at}: {result.error}",
            where=result.where,
            fix="mend the plugin, or deny it with POSTTRAIN_DISABLE_PLUGINS",
        )
    return result
