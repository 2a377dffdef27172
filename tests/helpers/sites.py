"""Nodes as hand-off rules see them: small graphs of stages that do nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.artifacts.kinds import FACTS_OF, POLICY, Kind
from posttrain.artifacts.manifest import Artifact, Manifest
from posttrain.contracts.loss import Family
from posttrain.contracts.rule import Rule, Site
from posttrain.contracts.stage import Finding, Input, Port, Stage
from posttrain.contracts.trainer import Trainer

DATASET = frozenset({Kind.DATASET})
REWARDS = frozenset({Kind.REWARD_MODEL, Kind.PROCESS_REWARD_MODEL})


class Load(Stage):
    """Makes anything of nothing."""

    def outputs(self, config: Any) -> tuple[Port, ...]:
        return (Port("data", DATASET), Port("model", POLICY))


class Sample(Stage):
    """Makes a dataset with a policy."""

    inputs = (Port("model", POLICY), Port("prompts", DATASET))

    def outputs(self, config: Any) -> tuple[Port, ...]:
        return (Port("data", DATASET),)


class Split(Stage):
    """Hands a dataset on."""

    inputs = (Port("data", DATASET),)

    def outputs(self, config: Any) -> tuple[Port, ...]:
        return (Port("data", DATASET),)


class Measure(Stage):
    """Evaluates policies."""

    inputs = (
        Port("models", POLICY, many=True),
        Port("data", DATASET, formats=frozenset({"messages", "prompt"})),
    )

    def outputs(self, config: Any) -> tuple[Port, ...]:
        return (Port("report", frozenset({Kind.REPORT})),)


class Judge(Stage):
    """Compares policies on a report, without a dataset."""

    inputs = (
        Port("candidate", POLICY),
        Port("baseline", POLICY),
        Port("report", frozenset({Kind.REPORT}), optional=True, many=True),
    )

    def outputs(self, config: Any) -> tuple[Port, ...]:
        return (Port("verdict", frozenset({Kind.REPORT})),)


class Alter(Stage):
    """Hands a policy on."""

    inputs = (Port("model", POLICY),)

    def outputs(self, config: Any) -> tuple[Port, ...]:
        return (Port("model", POLICY),)


class Promote(Stage):
    """Publishes a policy on a verdict."""

    inputs = (Port("model", POLICY), Port("verdict", frozenset({Kind.REPORT})))

    def outputs(self, config: Any) -> tuple[Port, ...]:
        return (Port("receipt", frozenset({Kind.REPORT})),)


class Score(Stage):
    """Scores what a policy says with a reward model."""

    inputs = (Port("model", POLICY), Port("reward", REWARDS))

    def outputs(self, config: Any) -> tuple[Port, ...]:
        return (Port("data", DATASET),)


class Merge(Stage):
    """Combines an adapter with a model."""

    inputs = (Port("adapter", frozenset({Kind.ADAPTER})), Port("model", frozenset({Kind.MODEL})))

    def outputs(self, config: Any) -> tuple[Port, ...]:
        return (Port("model", frozenset({Kind.MODEL})),)


class Train(Trainer):
    """Trains a policy on preference pairs."""

    family = Family.PREFERENCE
    formats = frozenset({"preference", "messages"})
    inputs = (
        Port("model", POLICY),
        Port("teacher", POLICY, optional=True),
        Port("reference", POLICY, optional=True),
        Port("reward", REWARDS, optional=True),
        Port("data", DATASET, formats=formats, training=True),
        Port("eval", DATASET, formats=formats, optional=True),
    )

    def outputs(self, config: Any) -> tuple[Port, ...]:
        return (Port("model", POLICY),)

    def batch(self, scores: Any, config: Any) -> Any:
        raise AssertionError("nothing is trained here")


class TrainTokens(Train):
    """Trains a policy on tokens."""

    family = Family.TOKEN


STAGES: dict[str, type[Stage]] = {
    "load": Load, "sample": Sample, "split": Split, "measure": Measure, "judge": Judge, "merge": Merge,
    "train": Train, "train-tokens": TrainTokens, "alter": Alter, "promote": Promote, "score": Score,
}  # fmt: skip


def real(kind: Kind, facts: Any) -> Artifact:
    manifest = Manifest(kind=kind, facts=facts, files=())
    return Artifact(manifest.digest, manifest, Path("nowhere"))


def source(
    origin: str, kind: Kind, *, verified: bool = False, prompts: Sequence[str] | None = None, **facts: Any
) -> Input:
    known = FACTS_OF[kind](**facts)
    artifact = real(kind, known) if verified else None
    return Input(origin, kind, known, artifact, None if prompts is None else frozenset(prompts))


def policy(origin: str = "sft.model", **facts: Any) -> Input:
    return source(origin, Kind.MODEL, **facts)


def adapter(origin: str = "lora.model", **facts: Any) -> Input:
    return source(origin, Kind.ADAPTER, **facts)


def data(origin: str = "chats.data", **facts: Any) -> Input:
    return source(origin, Kind.DATASET, **facts)


def reward(origin: str = "rm.model", **facts: Any) -> Input:
    return source(origin, Kind.REWARD_MODEL, **facts)


def report(origin: str = "eval.report", **facts: Any) -> Input:
    return source(origin, Kind.REPORT, **facts)


def site(
    uses: str, *upstream: Site, node: str | None = None, config: Any = None, **inputs: Input | Sequence[Input]
) -> Site:
    """A node whose inputs come from the upstream nodes they are named after."""
    ports = {port: [given] if isinstance(given, Input) else list(given) for port, given in inputs.items()}
    makers = {maker.node: maker for maker in upstream}
    origins = [each.origin for given in ports.values() for each in given]
    made = {origin: makers[origin.split(".")[0]] for origin in origins if origin.split(".")[0] in makers}
    return Site(node or uses, uses, STAGES[uses](), config, ports, made)


def findings(rule: type[Rule], at: Site) -> list[Finding]:
    return list(rule().check(at))


def summary(rule: type[Rule], at: Site) -> list[tuple[str, str]]:
    """Level and certainty of each finding."""
    return [(str(finding.level), str(finding.certainty)) for finding in findings(rule, at)]
