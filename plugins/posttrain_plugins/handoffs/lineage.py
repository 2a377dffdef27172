"""What rules ask of a site and its ancestors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from posttrain.artifacts.kinds import POLICY, Kind
from posttrain.contracts.loss import Family
from posttrain.contracts.rule import Site
from posttrain.contracts.stage import Certainty, Input
from posttrain.contracts.trainer import Trainer

_PAIRED = frozenset({Family.PREFERENCE, Family.THREE_WAY})
_REWARDS = frozenset({Kind.REWARD_MODEL, Kind.PROCESS_REWARD_MODEL})


def policies(site: Site) -> list[tuple[str, Input]]:
    """Return the models and adapters that reach a site, with their ports."""
    return [
        (port, source) for port, sources in site.inputs.items() for source in sources if source.kind in POLICY
    ]


def reward_models(site: Site) -> list[tuple[str, Input]]:
    """Return the models that give numbers and reach a site, with their ports."""
    return [
        (port, source)
        for port, sources in site.inputs.items()
        for source in sources
        if source.kind in _REWARDS
    ]


def models(site: Site) -> list[tuple[str, Input]]:
    """Return the policies that reach a site and the models that give numbers, with their ports."""
    return [*policies(site), *reward_models(site)]


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


def same(one: Input, other: Input) -> bool:
    """Whether two inputs are known to be one artifact."""
    known = one.artifact is not None and other.artifact is not None
    return known and one.artifact.digest == other.artifact.digest  # type: ignore[union-attr]


def kin(site: Site) -> Iterator[tuple[str, Input, Input]]:
    """Yield the policies that reach a site, with their ports and the policies that each was made from."""
    for port, policy in policies(site):
        if (source := parent(site, policy)) is not None:
            yield port, policy, source


def parent(site: Site, policy: Input) -> Input | None:
    """Return the policy that another one was made from.

    Of a stage that takes several, it is the one at the port that is called like the output.
    """
    maker = site.upstream.get(policy.origin)
    if maker is None:
        return None
    found, output = policies(maker), policy.origin.rpartition(".")[2]
    same = [source for port, source in found if port == output]
    candidates = same if len(same) == 1 else [source for _, source in found]
    return candidates[0] if len(candidates) == 1 else None


def together(site: Site) -> Iterator[tuple[str, Input, Input]]:
    """Yield every two policies that a site takes, with the port of the second."""
    for (_, first), (port, second) in combinations(policies(site), 2):
        yield port, first, second


def prefers(site: Site) -> bool:
    """Whether a site trains on preference pairs, where it counts whose answers they are."""
    return isinstance(site.stage, Trainer) and site.stage.family in _PAIRED


def trains(site: Site) -> bool:
    """Whether a site optimizes a policy."""
    return isinstance(site.stage, Trainer)


def trained_on(site: Site) -> list[tuple[str, Input]]:
    """Return the datasets that a site trains on, with their ports."""
    ports = site.ports()
    return [(port, data) for port, data in datasets(site) if port in ports and ports[port].training]


def trainings(site: Site, policy: Input) -> Iterator[Site]:
    """Yield the training stages that a policy has been through, the last one first."""
    reader, source = site, policy
    while (maker := reader.upstream.get(source.origin)) is not None:
        if trains(maker):
            yield maker
        before = parent(reader, source)
        if before is None:
            return
        reader, source = maker, before


@dataclass(frozen=True)
class Generated:
    """A site that made a dataset with a policy, and that policy."""

    site: Site
    policy: Input


def generator_of(site: Site, data: Input) -> Generated | None:
    """Find the policy that generated a dataset: the only policy of the nearest sites upstream that have any.

    Sites in between hand datasets on: splits, filters and mixtures, and what tokenizes for a policy. A mixture of what
    several policies generated is none's.
    """
    makers = _generators(site, data)
    found = {policy.origin: Generated(maker, policy) for maker in makers for _, policy in policies(maker)}
    return next(iter(found.values())) if len(found) == 1 else None


def _generators(site: Site, data: Input) -> Iterator[Site]:
    """Yield the nearest sites upstream of a dataset that hold policies, each once; not what they read themselves."""
    queue, seen = [(site, data)], set[str]()
    while queue:
        reader, source = queue.pop(0)
        maker = reader.upstream.get(source.origin)
        if maker is None or maker.node in seen:
            continue
        seen.add(maker.node)
        if policies(maker) and source.facts.tokens is None:
            yield maker
        else:
            queue.extend((maker, each) for _, each in datasets(maker))
