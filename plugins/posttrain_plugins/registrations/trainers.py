"""The trainers; each is a stage too."""

from __future__ import annotations

from posttrain import Registration

_HERE = "posttrain_plugins"

TRAINERS = [
    Registration("train.sft", "Supervised fine-tuning on completions", f"{_HERE}.trainers.sft:Sft"),
    Registration(
        "train.dpo",
        "Direct preference optimization",
        f"{_HERE}.trainers.dpo:Dpo",
        reference="https://arxiv.org/abs/2305.18290",
    ),
    Registration(
        "train.prm",
        "Process reward models: whether each step of an answer is right",
        f"{_HERE}.trainers.prm:Prm",
        reference="https://arxiv.org/abs/2305.20050",
    ),
    Registration(
        "train.cpo",
        "Preference optimization without a reference: CPO, SimPO, AlphaPO",
        f"{_HERE}.trainers.cpo:Cpo",
        reference="https://arxiv.org/abs/2401.08417",
    ),
    Registration(
        "train.orpo",
        "Odds ratio preference optimization",
        f"{_HERE}.trainers.orpo:Orpo",
        reference="https://arxiv.org/abs/2403.07691",
    ),
    Registration(
        "train.tpo",
        "Triple preference optimization: pairs beside a gold answer",
        f"{_HERE}.trainers.tpo:Tpo",
        reference="https://arxiv.org/abs/2405.16681",
    ),
    Registration(
        "train.kto",
        "Answers that are good or bad, one by one: KTO, APO, BCO",
        f"{_HERE}.trainers.kto:Kto",
        reference="https://arxiv.org/abs/2402.01306",
    ),
    Registration(
        "train.reward",
        "Reward models: a number for an answer",
        f"{_HERE}.trainers.reward:Reward",
        reference="https://arxiv.org/abs/2203.02155",
    ),
]
