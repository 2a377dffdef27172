"""Contrastive preference optimization, and other losses over pairs without a reference."""

from __future__ import annotations

from posttrain_plugins.trainers.pairs import PairTrainer
from posttrain_plugins.trainers.reference_free import Losses, ReferenceFreeOptions, reference_free


class CpoOptions(ReferenceFreeOptions):
    """Options of `train.cpo`."""

    loss: Losses = reference_free("cpo")


class Cpo(PairTrainer):
    """Train on preference pairs without a reference (Xu et al. 2024, https://arxiv.org/abs/2401.08417).

    Nothing is scored beforehand. Dropout is off.
    """

    config = CpoOptions
