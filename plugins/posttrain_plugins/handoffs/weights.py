"""Weights: all there, with the right head, as precise and shaped as what they were made from, and changed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from posttrain.artifacts.kinds import POLICY, Kind
from posttrain.contracts.rule import Rule, Site
from posttrain.contracts.stage import Finding, Input, Level
from posttrain_plugins.handoffs.lineage import kin, named, trains

_BITS: Mapping[str, int] = {
    "float64": 64,
    "float32": 32,
    "bfloat16": 16,
    "float16": 16,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
}
_HEADS: Mapping[Kind, tuple[str, ...]] = {
    Kind.MODEL: ("SequenceClassification", "TokenClassification", "RewardModel", "QuestionAnswering"),
    Kind.REWARD_MODEL: ("CausalLM", "ConditionalGeneration", "LMHeadModel"),
    Kind.PROCESS_REWARD_MODEL: ("CausalLM", "ConditionalGeneration", "LMHeadModel"),
}
"""Ends of architectures that cannot be what an artifact of a kind is."""


class WeightsMissing(Rule):
    """The files lack weights that the config promises.

    Libraries make them up: a layer or a reward head of random numbers, with a warning among many. A conversion that
    dropped a layer, a wrapper's prefix before every name (`module.`), a head that was never saved. The model answers
    nonsense, or rewards at random.
    """

    code = "H030"
    title = "weights or a head are missing"
    level = Level.ERROR
    fix = "get a complete checkpoint; rename the weights where a wrapper's prefix is left in their names"

    def check(self, site: Site) -> Iterable[Finding]:
        """Report models and reward models whose files are incomplete."""
        for port, model in _models(site):
            if model.facts.missing:
                message = (
                    f"{named(model)} lacks weights that its config asks for: {', '.join(model.facts.missing)}"
                )
                yield self.finding(message, model, port=port)


class HeadWrong(Rule):
    """A model has the head of another kind: a policy with a classification head, a reward model with a language one.

    The right head would be made up when it is opened. Loading a reward model as a policy, or the other way round,
    raises no error in most libraries.
    """

    code = "H031"
    title = "the head of another kind of model"
    level = Level.ERROR
    fix = (
        "connect a model of the right kind; `model.load` tells policies and reward models apart by the "
        "`architectures` in `config.json`, which must be what the weights are"
    )

    def check(self, site: Site) -> Iterable[Finding]:
        """Compare the architecture's name with the artifact's kind."""
        for port, model in _models(site):
            head = model.facts.head or ""
            if head.endswith(_HEADS.get(model.kind, ())):
                yield self.finding(
                    f"{named(model)} is a {model.kind} but its head is that of {head}", model, port=port
                )


class DtypeNarrowed(Rule):
    """A policy's weights are less precise than those of the policy it was made from.

    A merge or an export in 16 bits rounds away updates that are smaller than a weight's last bit, which are most of a
    fine-tuning with a small learning rate; in 4 bits whole fine-tunings were erased.
    """

    code = "H032"
    title = "the weights lost precision on the way"
    level = Level.WARNING
    fix = "hand on the weights in the precision that they were trained in, and narrow them after the last training"

    def check(self, site: Site) -> Iterable[Finding]:
        """Compare each model's precision with its parent's."""
        for port, policy, source in kin(site):
            own, before = _BITS.get(policy.facts.dtype or ""), _BITS.get(source.facts.dtype or "")
            if (
                {policy.kind, source.kind} <= {Kind.MODEL}
                and own is not None
                and before is not None
                and own < before
            ):
                message = (
                    f"{named(policy)} is in {policy.facts.dtype}, {named(source)}, which it comes from, in "
                    f"{source.facts.dtype}"
                )
                yield self.finding(message, policy, source, port=port)


class ShapeChanged(Rule):
    """A policy's config says something else about the computation than that of the policy it was made from.

    A conversion that forgets `rope_theta` or a scaling factor, or a context length that is raised in the config
    alone: every weight is in its place, and the model computes something else, most of all in long texts.
    """

    code = "H033"
    title = "the architecture's options changed on the way"
    level = Level.WARNING
    fix = "let the stage in between copy `config.json`, or train after the change"

    def check(self, site: Site) -> Iterable[Finding]:
        """Compare what both configs state; what one of them leaves out is not compared."""
        for port, policy, source in kin(site):
            own, before = policy.facts.shape or {}, source.facts.shape or {}
            both = sorted(own.keys() & before.keys())
            changed = [name for name in both if not _equal(own[name], before[name])]
            if (policy.kind, source.kind) == (Kind.MODEL, Kind.ADAPTER) and "tie_word_embeddings" in changed:
                # Of two layers that share weights an adapter may train one alone; merged, they are two.
                changed.remove("tie_word_embeddings")
            if changed:
                what = ", ".join(f"`{name}` {own[name]} instead of {before[name]}" for name in changed[:3])
                message = f"{named(policy)} has {what} of {named(source)}, which it comes from"
                yield self.finding(message, policy, source, port=port)


class TrainingIdle(Rule):
    """A training stage put out exactly the weights that it got.

    A resume that finds nothing left to do, a frozen model, an optimizer that was given no parameters: the stage ends
    with success, and the next one starts from the untrained model.
    """

    code = "H034"
    title = "training changed nothing"
    level = Level.WARNING
    fix = "look at the stage's steps and loss; raise learning_rate if the updates are below the weights' precision"

    def check(self, site: Site) -> Iterable[Finding]:
        """Compare digests: equal content is one artifact."""
        for port, policy, source in kin(site):
            maker = site.upstream[policy.origin]
            both = policy.artifact is not None and source.artifact is not None
            if both and trains(maker) and policy.artifact.digest == source.artifact.digest:  # type: ignore[union-attr]
                message = f"{maker.node} put out the very model that it was given, {named(source)}"
                yield self.finding(message, policy, source, port=port)


def _equal(one: Any, other: Any) -> bool:
    """Whether two options are the same; some formats hold numbers in single precision."""
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-6)
    return bool(one == other)


def _models(site: Site) -> list[tuple[str, Input]]:
    kinds = {*POLICY, Kind.REWARD_MODEL, Kind.PROCESS_REWARD_MODEL}
    return [(port, each) for port, given in site.inputs.items() for each in given if each.kind in kinds]
