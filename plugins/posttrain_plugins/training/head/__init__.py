"""Scores of supervised tokens: log-prob, entropy, top-1 and Σ p², without logits for all the others."""

from __future__ import annotations

from posttrain_plugins.training.head.choice import TOLERANCE, budget_of, choose_head, vocabulary_of
from posttrain_plugins.training.head.fused import Plan, choose_chunk, linear_scores
from posttrain_plugins.training.head.logits import logit_scores
from posttrain_plugins.training.head.paths import AnalyticHead, FullHead, GenericHead, KeepHead, unwrapped
from posttrain_plugins.training.head.scores import Head, Tail, TokenScores, Wanted
from posttrain_plugins.training.head.value import ValueHead, choose_value_head

__all__ = [
    "TOLERANCE",
    "AnalyticHead",
    "FullHead",
    "GenericHead",
    "Head",
    "KeepHead",
    "Plan",
    "Tail",
    "TokenScores",
    "ValueHead",
    "Wanted",
    "budget_of",
    "choose_chunk",
    "choose_head",
    "choose_value_head",
    "linear_scores",
    "logit_scores",
    "unwrapped",
    "vocabulary_of",
]
