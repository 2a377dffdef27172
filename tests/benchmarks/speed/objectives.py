"""What is trained: columns, formats, and what a step of each trainer has to compute. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

OTHER = "other"
"""The column of another row's answer."""


@dataclass(frozen=True)
class Objective:
    """A trainer, as far as the benchmark has to know it.

    Args:
        title: How pages call it.
        format: Of its dataset.
        learned: Columns of the answers that are learned.
        measured: Columns of answers that a step scores without learning them.
        referenced: Is each answer scored by the starting policy, too?
        judged: Does the model give a number for an answer, and no distribution over the vocabulary?
        by_tokens: Does TRL average some of the loss over the tokens of a micro-batch? Then a step that is cut into
            several has another loss than a whole one.
        memory: Are the shapes' shares of TRL's memory wanted? Otherwise not to take more.
    """

    title: str
    format: str
    learned: tuple[str, ...] = ("chosen", "rejected")
    measured: tuple[str, ...] = ()
    referenced: bool = False
    judged: bool = False
    by_tokens: bool = False
    memory: bool = True


OBJECTIVES: Mapping[str, Objective] = {
    "sft": Objective("SFT", "prompt_completion", learned=("completion",)),
    "dpo": Objective("DPO", "preference", referenced=True),
    "kto": Objective(
        "KTO", "unpaired_preference", learned=("completion",), measured=(OTHER,), referenced=True
    ),
    "orpo": Objective("ORPO", "preference", by_tokens=True),
    "cpo": Objective("CPO", "preference", by_tokens=True),
    "reward": Objective("reward", "preference", judged=True, memory=False),
}
"""By the name after `train.`."""
