"""The pages of evidence, and which objectives each tells of. Data only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Page:
    """A page and the objectives that it tells of.

    Args:
        name: Of its file.
        title: Its first line.
        grid: First line of the page about TRL's settings.
        objectives: Names of the objectives.
        about: What is to be known of these.
        more: Does it show how memory follows the vocabulary, and times the size of the dataset?
    """

    name: str
    title: str
    grid: str
    objectives: tuple[str, ...]
    about: tuple[str, ...]
    more: bool


SPEED = Page(
    "speed",
    "Speed and memory of the training loop",
    "Settings of TRL that were tried",
    ("sft", "dpo"),
    ("DPO times include the step's share of the passes over the reference for one epoch.",),
    True,
)
OFFLINE = Page(
    "speed-offline",
    "Speed and memory of KTO, ORPO, CPO and reward models",
    "Settings of TRL that were tried for KTO, ORPO, CPO and reward models",
    ("kto", "orpo", "cpo", "reward"),
    (
        "",
        "What both sides compute, where they would differ otherwise:",
        "",
        "- KTO: both are given the same answers of other rows, those that posttrain draws from the dataset. TRL",
        "  estimates the KL divergence in each micro-batch, posttrain over the step: the same in TRL's default, and 0",
        "  on both sides in the first step, whose gradients are compared. TRL needs two rows in a micro-batch, so no",
        "  setting has one. Times include the step's share of the passes over the reference for one epoch.",
        "- ORPO: the likelihood is that of the chosen answers, as in the paper. TRL's trainer takes it of prompts too;",
        "  here it has the forward pass of TRL's CPO in place of its own, which makes the same logits and the same",
        "  cross-entropy of all of them, with prompts masked.",
        "- ORPO and CPO: of a step that is cut into micro-batches, TRL averages the likelihood over the tokens of",
        "  each, and posttrain over those of the step. The gradient is compared with TRL's default, a step in one",
        "  piece.",
        "- Reward models: both start from the same head, trained with the Bradley-Terry loss.",
        "- Losses of 20 steps are compared in `tests/parity/`, differences listed in [Losses beside",
        "  TRL's](../parity-losses.md).",
    ),
    False,
)
PAGES = (SPEED, OFFLINE)
