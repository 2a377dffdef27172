"""What steps of posttrain hold and what they spend their time on: lines for a page."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from comparison import Found
from objectives import OBJECTIVES
from pages import Page
from scenarios import SCENARIOS

MIB = 2**20
Profiles = Mapping[tuple[str, str], Mapping[str, Any]]
"""Profiles by shape and objective."""
HELD = {
    "weights": "weights",
    "moments": "Adam's moments",
    "gradients": "gradients of earlier micro-batches",
    "kept": "kept by the forward pass",
    "backward": "more in the backward pass",
    "other": "tokenizer, rows, kernels",
    "spare": "freed blocks, pages of libraries",
    "resident": "in all",
}
SPENT = ("products of the head", "other products", "attention", "optimizer", "the rest")


def profile_lines(page: Page, found: Found) -> list[str]:
    """Return the section about profiles, or nothing if none was made."""
    profiles = {
        (name, objective): record
        for name in SCENARIOS
        for objective in page.objectives
        if (record := found.get(("profile", name, objective))) is not None
    }
    if not profiles:
        return []
    return ["## Profiles", "", *_held(profiles, found), "", *_spent(profiles), ""]


def _held(profiles: Profiles, found: Found) -> list[str]:
    return [
        "posttrain by itself. What the process held beside the imports when it held most, over the first four steps,",
        "in MiB. What is kept grows with the micro-batch's tokens (activations) and supervised tokens (logits); the",
        "backward pass begins with the gradient of the head, while all of it is still there. Freed blocks are kept for",
        "the next step, and fit the less well the more steps differ in size. At least: weights, their gradients and",
        "moments, tokenizer, rows and kernels, and no activation. Wanted: the share of TRL's best that is aimed at.",
        "",
        *_table(
            profiles,
            [*HELD.values(), "at least", "wanted"],
            lambda case, record: [
                *(f"{record['memory'][part] / MIB:.0f}" for part in HELD),
                f"{_least(record['memory']) / MIB:.0f}",
                _wanted(found, *case),
            ],
        ),
    ]


def _least(held: Mapping[str, int]) -> int:
    """Return what a step takes however it is computed, if all weights are trained."""
    return 2 * held["weights"] + held["moments"] + held["other"]


def _wanted(found: Found, name: str, objective: str) -> str:
    """Return at most how much memory is wanted, if TRL's is known."""
    race = found.get(("race", name, objective), {})
    best = found.get(("memory", name, objective, race.get("best", "")))
    return "" if best is None else f"{SCENARIOS[name].share(objective) * best['bytes'] / MIB:.0f}"


def _spent(profiles: Profiles) -> list[str]:
    return [
        "Where the time of six later steps went. The rest is what is done element by element (norms, rotations, gates,",
        "softmax, clipping) and what Python, torch and transformers take to call it all.",
        "",
        *_table(profiles, SPENT, lambda _, record: [f"{record['time'][part]:.0%}" for part in SPENT]),
    ]


def _table(
    profiles: Profiles,
    headings: Collection[str],
    cells: Callable[[tuple[str, str], Mapping[str, Any]], list[str]],
) -> list[str]:
    rows = [
        [name, OBJECTIVES[objective].title, *cells((name, objective), record), f"`{record['commit'][:7]}`"]
        for (name, objective), record in profiles.items()
    ]
    head = f"| shape | | {' | '.join(headings)} | commit |"
    return [head, "|" + "---|" * (len(headings) + 3), *(f"| {' | '.join(row)} |" for row in rows)]
