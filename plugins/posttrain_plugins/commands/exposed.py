"""The datasets of a pipeline: what its trainers train on and what it evaluates on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from posttrain.artifacts.kinds import POLICY, Kind
from posttrain.artifacts.store import Store
from posttrain.contracts.stage import Input
from posttrain.errors import DataError
from posttrain.pipeline import Pipeline, Selection
from posttrain.planning.nodes import Node, Reference
from posttrain.planning.plan import Plan
from posttrain_plugins.commands.sources import Dataset, stored

_ROWS = frozenset({Kind.DATASET, Kind.REPORT})


@dataclass(frozen=True)
class Exposed:
    """The datasets of a pipeline.

    Args:
        training: What it trains on.
        evaluation: What it evaluates on, while it trains or afterwards.
        unread: Those whose rows are not there yet, because models make them.
    """

    training: tuple[Dataset, ...]
    evaluation: tuple[Dataset, ...]
    unread: tuple[str, ...]


@contextmanager
def exposed(pipeline: Pipeline, workspace: Path) -> Iterator[Exposed]:
    """Find the datasets of a pipeline while the block lasts.

    Rows come from the store where they are there. What data stages alone make is made for the occasion, beside the
    store and without a run; what needs a model is left out and named.

    Raises:
        PosttrainError: The pipeline, or one of its data stages, is wrong.
    """
    plan = pipeline.plan(workspace)
    training, evaluation = references(plan)
    found: dict[Reference, Dataset] = {}
    for reference in {**training, **evaluation}:
        artifact = plan.outputs[reference].artifact
        if artifact is not None:
            found[reference] = stored(artifact, str(reference))
    missing = [reference for reference in {**training, **evaluation} if reference not in found]
    makeable = [reference for reference in missing if _data_alone(plan, reference.node)]
    with ExitStack() as stack:
        if makeable:
            found |= stack.enter_context(_made(pipeline, workspace, makeable))
        yield Exposed(
            tuple(found[reference] for reference in training if reference in found),
            tuple(found[reference] for reference in evaluation if reference in found),
            tuple(str(reference) for reference in missing if reference not in found),
        )


def references(plan: Plan) -> tuple[dict[Reference, None], dict[Reference, None]]:
    """Return which outputs are trained on, and which are evaluated on."""
    training: dict[Reference, None] = {}
    evaluation: dict[Reference, None] = {}
    for node in plan.graph.nodes.values():
        ports = {port.name: port for port in node.plugin.inputs}
        for name, given in node.inputs.items():
            datasets = [each for each in given if plan.outputs[each].kind is Kind.DATASET]
            if ports[name].training:
                training |= dict.fromkeys(datasets)
            elif _judges(node, plan.outputs.__getitem__):
                evaluation |= dict.fromkeys(datasets)
    return training, evaluation


def _judges(node: Node, known: Callable[[Reference], Input]) -> bool:
    """Whether a node holds policies against the datasets that it does not train on."""
    if any(port.training for port in node.plugin.inputs):
        return True
    reports = any(Kind.REPORT in port.kinds for port in node.plugin.outputs(node.config))
    return reports and any(known(each).kind in POLICY for given in node.inputs.values() for each in given)


def _data_alone(plan: Plan, name: str) -> bool:
    """Whether a node and all before it deal with datasets and nothing else, in this interpreter."""
    node = plan.graph.nodes[name]
    ports = (*node.plugin.inputs, *node.plugin.outputs(node.config))
    own = all(port.kinds <= _ROWS for port in ports) and not node.plugin.external
    return (
        own
        and node.runtime.python is None
        and all(_data_alone(plan, each) for each in plan.graph.dependencies[name])
    )


@contextmanager
def _made(pipeline: Pipeline, workspace: Path, wanted: list[Reference]) -> Iterator[dict[Reference, Dataset]]:
    """Make outputs of data stages in a workspace that is gone afterwards."""
    workspace.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=workspace, prefix="datasets-") as directory:
        beside = Path(directory)
        nodes = tuple(dict.fromkeys(reference.node for reference in wanted))
        report = pipeline.run(beside, runner="inline", selection=Selection(only=nodes), track=False)
        store = Store(beside)
        found = {}
        for reference in wanted:
            digest = report.results[reference.node].outputs.get(reference.port)
            if digest is None:
                raise DataError(
                    "this dataset could not be made",
                    where=str(reference),
                    found=report.results[reference.node].summary or None,
                    fix="`posttrain run` with `--only` shows why",
                )
            found[reference] = stored(store.get(digest), str(reference))
        yield found
