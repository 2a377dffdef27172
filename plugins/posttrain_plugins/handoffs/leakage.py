"""Evaluation prompts must not occur in what the evaluated policies were trained on."""

from __future__ import annotations

from collections.abc import Iterable

from posttrain.artifacts.kinds import Kind
from posttrain.contracts.rule import Site
from posttrain.contracts.stage import Certainty, Finding, Input, Level
from posttrain_plugins.data.rows import asked_prompts, trained_prompts
from posttrain_plugins.handoffs.lineage import certainty, datasets, policies

NAME = "leakage"
TEXT = "text"
_EXAMPLES = 3


class Leakage:
    """Compares the prompts of evaluation data with those of every dataset that an ancestor trains on.

    An evaluation is a node that takes policies and a dataset it does not train on, and gives a report: a leak is an
    error. Where a trainer evaluates while it trains, a leak is a warning: it spoils early stopping, and no report.
    """

    def check(self, site: Site) -> Iterable[Finding]:
        """Report prompts that occur in both, and say when that cannot be told yet."""
        evaluated = _evaluation_data(site)
        if not evaluated:
            return
        trained = _training_data(site)
        level = Level.ERROR if _reports(site) else Level.WARNING
        for port, data in evaluated:
            for source, nodes in trained:
                yield from _judge(port, data, source, nodes, level)


def _evaluation_data(site: Site) -> list[tuple[str, Input]]:
    ports = site.ports()
    trains = any(port.training for port in ports.values())
    if not (_reports(site) or trains) or not policies(site):
        return []
    return [(port, data) for port, data in datasets(site) if port in ports and not ports[port].training]


def _reports(site: Site) -> bool:
    return any(Kind.REPORT in port.kinds for port in site.stage.outputs(site.config))


def _training_data(site: Site) -> list[tuple[Input, list[str]]]:
    """Return each dataset that the node and its ancestors train on, with the nodes that do, by origin."""
    found: dict[str, tuple[Input, list[str]]] = {}
    for ancestor in (site, *site.ancestors()):
        ports = ancestor.ports()
        for port, data in datasets(ancestor):
            if port in ports and ports[port].training:
                found.setdefault(data.origin, (data, []))[1].append(ancestor.node)
    return list(found.values())


def _judge(port: str, data: Input, source: Input, nodes: list[str], level: Level) -> Iterable[Finding]:
    where = f"the training data of {', '.join(nodes)} ({source.origin})"
    if data.origin == source.origin:
        yield _leak(port, data, source, level, f"the evaluation data is {where}")
        return
    if data.prompts is None or source.prompts is None:
        message = f"whether prompts of {data.origin} occur in {where} is not known yet"
        yield Finding(NAME, Level.NOTE, Certainty.UNKNOWN, message, port=port)
        return
    if _incomparable(data, source):
        message = f"whether prompts of {data.origin} occur in {where} cannot be told: `text` has no prompts"
        yield Finding(NAME, Level.NOTE, Certainty.UNKNOWN, message, port=port)
        return
    asked = asked_prompts(data.prompts)
    common = sorted(asked & trained_prompts(source.prompts))
    if not common:
        return
    message = f"{len(common)} of {len(asked)} evaluation prompts also occur in {where}"
    yield _leak(port, data, source, level, f"{message}, with the hashes {', '.join(common[:_EXAMPLES])}")


def _incomparable(data: Input, source: Input) -> bool:
    """Whether one of the two is plain text, whose rows are hashed whole, and the other is not."""
    return bool((data.facts.format == TEXT) != (source.facts.format == TEXT))


def _leak(port: str, data: Input, source: Input, level: Level, message: str) -> Finding:
    fix = (
        "evaluate on rows that were split off before training, with `split_by: prompt`, or remove these "
        "from the training data"
    )
    return Finding(NAME, level, certainty(data, source), message, port=port, fix=fix)
