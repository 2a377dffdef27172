"""What the batch of each family is made of: roles of sequences, numbers with a gradient, and how they make it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posttrain.contracts.loss import (
    Absent,
    AnswerTokens,
    Family,
    Need,
    PreferenceBatch,
    ProcessRewardBatch,
    RewardBatch,
    ThreeWayBatch,
    TokenBatch,
    UnpairedBatch,
)

if TYPE_CHECKING:
    from posttrain_plugins.testing.draws import Draw

ROLES: Mapping[Family, tuple[str, ...]] = {
    Family.TOKEN: ("completion",),
    Family.PREFERENCE: ("chosen", "rejected"),
    Family.THREE_WAY: ("chosen", "rejected", "gold"),
    Family.UNPAIRED: ("completion",),
    Family.REWARD: ("chosen", "rejected"),
    Family.PROCESS_REWARD: ("completion",),
}
"""What the sequences of an example are to it, in their order."""

_POLICY: tuple[tuple[str, Need | None], ...] = (("logp", None), ("squares", Need.SQUARES))
_VALUE: tuple[tuple[str, Need | None], ...] = (("value", None),)
LEARNED: Mapping[Family, tuple[tuple[str, Need | None], ...]] = {
    Family.TOKEN: (*_POLICY, ("entropy", Need.ENTROPY), ("mean_logp", Need.MEAN_LOGP)),
    Family.PREFERENCE: _POLICY,
    Family.THREE_WAY: _POLICY[:1],
    Family.UNPAIRED: _POLICY[:1],
    Family.REWARD: _VALUE,
    Family.PROCESS_REWARD: _VALUE,
}
"""The numbers of tokens that carry a gradient, with what the loss has to declare for it."""
_UNSHOWN: Any = None
"""A field that the loss has not declared, and that refuses to be read then."""
_UNCOMPARED: Any = Absent(Need.REFERENCE, "reference_mismatched")


def _token(draw: Draw) -> TokenBatch:
    owner = draw.owner[draw.sequence]
    return TokenBatch(
        logp=draw.tokens["logp"],
        entropy=draw.tokens["entropy"] * draw.shows(Need.ENTROPY),
        top1=draw.tokens["top1"] & draw.lavish,
        example=owner,
        weight=draw.rows["weight"][owner],
        squares=draw.tokens["squares"] if draw.shows(Need.SQUARES) else _UNSHOWN,
        mean_logp=draw.tokens["mean_logp"] if draw.shows(Need.MEAN_LOGP) else _UNSHOWN,
    )


def _columns(draw: Draw, values: Tensor) -> dict[str, Tensor]:
    """Cut one number a sequence into one column a role."""
    width = len(draw.owner) // draw.size
    return dict(zip(ROLES[draw.family], values.view(-1, width).unbind(1), strict=False))


def _preference(draw: Draw) -> PreferenceBatch:
    logp, lengths = _columns(draw, draw.totals("logp")), _columns(draw, draw.lengths.to(draw.tokens["logp"]))
    shown = draw.shows(Need.REFERENCE)
    reference = _columns(draw, draw.totals("reference")) if shown else {}
    tokens = AnswerTokens(
        logp=draw.tokens["logp"],
        example=draw.owner[draw.sequence],
        answer=draw.answer[draw.sequence],
        place=draw.place,
        reference=draw.tokens["reference"] if draw.shows(Need.REFERENCE_TOKENS) else _UNSHOWN,
        squares=draw.tokens["squares"] if draw.shows(Need.SQUARES) else _UNSHOWN,
    )
    return PreferenceBatch(
        chosen=logp["chosen"],
        rejected=logp["rejected"],
        reference_chosen=reference.get("chosen", _UNSHOWN),
        reference_rejected=reference.get("rejected", _UNSHOWN),
        chosen_tokens=lengths["chosen"],
        rejected_tokens=lengths["rejected"],
        weight=draw.rows["weight"],
        tokens=tokens,
        own=draw.rows["own"] if draw.shows(Need.AUTHORS) else _UNSHOWN,
        preference=draw.rows["preference"] if draw.shows(Need.PREFERENCE) else _UNSHOWN,
    )


def _three_way(draw: Draw) -> ThreeWayBatch:
    logp, lengths = _columns(draw, draw.totals("logp")), _columns(draw, draw.lengths.to(draw.tokens["logp"]))
    return ThreeWayBatch(
        **logp,
        **{f"{role}_tokens": length for role, length in lengths.items()},
        weight=draw.rows["weight"],
    )


def _unpaired(draw: Draw) -> UnpairedBatch:
    logp = draw.totals("logp")
    unknown = torch.full_like(draw.rows["mismatched"], torch.nan)
    return UnpairedBatch(
        logp=logp,
        reference=draw.totals("reference") if draw.shows(Need.REFERENCE) else _UNSHOWN,
        tokens=draw.lengths.to(logp),
        desirable=draw.rows["desirable"],
        weight=draw.rows["weight"],
        mismatched=unknown if draw.shows(Need.MISMATCHED) else _UNSHOWN,
        reference_mismatched=unknown if draw.shows(Need.MISMATCHED) else _UNSHOWN,
    )


def mismatched_batch(draw: Draw) -> UnpairedBatch:
    """Return other rows' answers to the prompts of these rows, apart from their own answers."""
    unknown = torch.full_like(draw.rows["mismatched"], torch.nan)
    return UnpairedBatch(
        logp=unknown,
        reference=unknown,
        tokens=unknown,
        desirable=draw.rows["desirable"],
        weight=draw.rows["weight"],
        mismatched=draw.rows["mismatched"],
        reference_mismatched=draw.rows["reference_mismatched"] if draw.shows(Need.REFERENCE) else _UNCOMPARED,
    )


def _reward(draw: Draw) -> RewardBatch:
    return RewardBatch(
        reward=draw.tokens["value"],
        score=draw.sequences["score"],
        example=draw.owner,
        weight=draw.rows["weight"],
        margin=draw.rows["margin"] if draw.shows(Need.MARGIN) else _UNSHOWN,
    )


def _process_reward(draw: Draw) -> ProcessRewardBatch:
    owner = draw.owner[draw.sequence]
    return ProcessRewardBatch(
        logit=draw.tokens["value"],
        label=draw.tokens["label"],
        example=owner,
        weight=draw.rows["weight"][owner],
    )


BUILDERS: Mapping[Family, Callable[[Any], Any]] = {
    Family.TOKEN: _token,
    Family.PREFERENCE: _preference,
    Family.THREE_WAY: _three_way,
    Family.UNPAIRED: _unpaired,
    Family.REWARD: _reward,
    Family.PROCESS_REWARD: _process_reward,
}
"""How a batch of each family comes from drawn numbers."""
