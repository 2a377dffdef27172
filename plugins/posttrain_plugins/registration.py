"""The built-in plugins, announced through the same hooks as anybody's. Imports nothing heavy."""

from __future__ import annotations

from posttrain import Registration, hookimpl
from posttrain_plugins.registrations.backends import BACKENDS
from posttrain_plugins.registrations.callbacks import CALLBACKS
from posttrain_plugins.registrations.commands import COMMANDS
from posttrain_plugins.registrations.formats import FORMATS
from posttrain_plugins.registrations.losses import LOSSES
from posttrain_plugins.registrations.rules import RULES
from posttrain_plugins.registrations.stages import STAGES
from posttrain_plugins.registrations.trainers import TRAINERS

POSTTRAIN_API = ">=1,<2"

_HERE = "posttrain_plugins"


@hookimpl
def posttrain_stages() -> list[Registration]:
    """The stages that train nothing."""
    return STAGES


@hookimpl
def posttrain_trainers() -> list[Registration]:
    """The trainers; each is a stage too."""
    return TRAINERS


@hookimpl
def posttrain_losses() -> list[Registration]:
    """One file per loss."""
    return LOSSES


@hookimpl
def posttrain_backends() -> list[Registration]:
    """How the ranks of a training work together."""
    return BACKENDS


@hookimpl
def posttrain_callbacks() -> list[Registration]:
    """One file per callback."""
    return CALLBACKS


@hookimpl
def posttrain_formats() -> list[Registration]:
    """What rows may look like: first those that datasets in the store have, then those of other tools."""
    return FORMATS


@hookimpl
def posttrain_rewards() -> list[Registration]:
    """The rewards."""
    return [
        Registration(
            "exact", "1 when the completion equals the reference answer", f"{_HERE}.rewards.exact:Exact"
        ),
        Registration(
            "model", "What a trained reward model says of the answer", f"{_HERE}.rewards.model:Model"
        ),
        Registration(
            "process",
            "How likely the steps of the answer are right, after a process reward model",
            f"{_HERE}.rewards.process_model:Process",
        ),
    ]


@hookimpl
def posttrain_generators() -> list[Registration]:
    """The synthetic tasks."""
    return [
        Registration("reverse", "Reverse a string", f"{_HERE}.data.generators.characters:Reverse"),
        Registration(
            "reverse_pairs",
            "Reverse a string: right and nearly right answers in pairs",
            f"{_HERE}.data.generators.characters:ReversePairs",
        ),
        Registration(
            "addition", "Add two numbers, digits reversed", f"{_HERE}.data.generators.characters:Addition"
        ),
        Registration(
            "sort_words", "Sort a short list of common words", f"{_HERE}.data.generators.sorting:SortWords"
        ),
        Registration(
            "running_sum",
            "Add digits up step by step, with labels for the steps",
            f"{_HERE}.data.generators.steps:RunningSum",
        ),
    ]


@hookimpl
def posttrain_rules() -> list[Registration]:
    """The hand-off rules: one class for each failure."""
    return RULES


@hookimpl
def posttrain_commands() -> list[Registration]:
    """The verbs around data, and those that train without a pipeline file."""
    return COMMANDS
