"""The verbs of the command line."""

from __future__ import annotations

from posttrain import Registration

_HERE = "posttrain_plugins.commands"

DIRECT = ("sft", "dpo", "kto", "cpo", "orpo", "tpo", "reward", "prm")
"""Trainers with a verb of their own; `posttrain train NAME` runs any."""

COMMANDS = [
    Registration("data", "Look at data files, check and change them", f"{_HERE}.data:VERBS"),
    Registration("train", "Run any trainer on a model and a dataset", f"{_HERE}.train:train"),
    *(
        Registration(name, f"Run train.{name} on a model and a dataset", f"{_HERE}.train:VERBS.{name}")
        for name in DIRECT
    ),
]
