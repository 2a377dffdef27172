"""The verbs of `posttrain data`, in the order in which they are listed."""

from __future__ import annotations

from posttrain import Registration

_HERE = "posttrain_plugins.commands"

VERBS = (
    Registration("inspect", "Show what training gets to see of rows", f"{_HERE}.inspect:inspect"),
    Registration("statistics", "Lengths, turns and duplicates of rows", f"{_HERE}.statistics:statistics"),
    Registration("validate", "Find everything that is wrong or odd with rows", f"{_HERE}.validate:validate"),
    Registration("convert", "Turn rows into those of another format", f"{_HERE}.convert:convert"),
    Registration("mix", "Take rows of several datasets in exact shares", f"{_HERE}.mix:mix"),
    Registration("split", "Split rows by their content", f"{_HERE}.split:split"),
    Registration("dedup", "Drop equal and nearly equal rows", f"{_HERE}.dedup:dedup"),
    Registration(
        "contamination", "Find evaluation rows in training data", f"{_HERE}.contamination:contamination"
    ),
)
