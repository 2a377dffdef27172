"""Odds ratio preference optimization."""

from __future__ import annotations

from posttrain_plugins.trainers.pairs import PairTrainer
from posttrain_plugins.trainers.reference_free import Losses, ReferenceFreeOptions, reference_free


class OrpoOptions(ReferenceFreeOptions):
    """Options of `train.orpo`."""

    loss: Losses = reference_free("orpo")


class Orpo(PairTrainer):
    """Train a base model on preference pairs at once (Hong et al. 2024, https://arxiv.org/abs/2403.07691).

    Nothing is scored beforehand. Dropout is off.
    """

    config = OrpoOptions
