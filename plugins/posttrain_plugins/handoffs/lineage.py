"""What rules ask of a site and its ancestors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from posttrain.artifacts.kinds import POLICY, Kind
from posttrain.contracts.rule import Site
from posttrain.contracts.stage import Certainty, Input


def policies(site: Site) -> list[tuple[str, Input]]:
    """Return the models and adapters that reach a site, with their ports."""
    return [
        (port, source) for port, sources in site.inputs.items() for source in sources if source.kind in POLICY
    ]


def datasets(site: Site) -> list[tuple[str, Input]]:
    """Return the datasets that reach a site, with their ports."""
    return [
        (port, source)
        for port, sources in site.inputs.items()
        for source in sources
        if source.kind == Kind.DATASET
    ]


def certainty(*sources: Input) -> Certainty:
    """Return what a finding about known facts of these inputs rests on."""
    return Certainty.VERIFIED if all(source.verified for source in sources) else Certainty.PREDICTED


def short(digest: str) -> str:
    """Return a digest as people see it."""
    return digest[:12]


def named(source: Input) -> str:
    """Return an input's origin, with its digest where there is one."""
    return source.origin if source.artifact is None else f"{source.origin} ({short(source.artifact.digest)})"


@dataclass(frozen=True)
class Generated:
    """A site that made a dataset with a policy, and that policy."""

    site: Site
    policy: Input


def generator_of(site: Site, data: Input) -> Generated | None:
    """Find the policy that generated a dataset: the only policy of the nearest site upstream that has any.

    Sites in between, such as splits and filters, hand datasets on.
    """
    for maker in _makers(site, data):
        found = policies(maker)
        if found:
            return Generated(maker, found[0][1]) if len(found) == 1 else None
    return None


def _makers(site: Site, data: Input) -> Iterator[Site]:
    """Yield the site that made a dataset, then those that made its datasets, nearest first."""
    queue, seen = [(site, data)], set[str]()
    while queue:
        reader, source = queue.pop(0)
        maker = reader.upstream.get(source.origin)
        if maker is None or maker.node in seen:
            continue
        seen.add(maker.node)
        yield maker
        queue.extend((maker, each) for _, each in datasets(maker))
