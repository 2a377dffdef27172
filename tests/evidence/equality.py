"""How far the same step is apart when it is cut, laid out, ordered, padded or shared by ranks otherwise.

The suites assert the bounds (`tests/plugins/test_training_*.py`, `tests/distributed/`); this measures what is left of
them, over the same trainers, losses, layouts, models and backends, with the same code.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ledger
import numpy as np
import torch
from helpers import laid_out
from helpers.rank_cases import BACKENDS, CASES, TRAINED_ON
from helpers.rank_work import compare_steps, training
from helpers.ranks import in_own_process
from helpers.stepping import BOUND, OF_KINDS, apart, examples, gradient, plain, stepper
from helpers.training import TRAININGS

from posttrain_plugins.training.layouts import LAYOUTS, blocks

TRIED = [*TRAININGS, *OF_KINDS]
CUTS = (1, 60, 150)
"""Tokens of a micro-batch, at most; the step has about 400."""
STOPS = (2, 5)
"""Steps after which a training of seven, three to an epoch, is stopped."""
LOG_PROBS = 1e-5


@dataclass(frozen=True)
class Measured:
    """The largest of several differences.

    Args:
        what: What was changed.
        cases: How many were compared.
        largest: The largest difference.
        at: Which case that was.
        bound: What the suites allow.
    """

    what: str
    cases: int
    largest: float
    at: str
    bound: float


def measured(what: str, found: Iterable[tuple[str, float]], bound: float) -> Measured:
    """Keep the largest; a difference that is no number counts as more than any."""
    every = dict(found)
    at = max(every, key=lambda name: every[name] if every[name] == every[name] else float("inf"))
    return Measured(what, len(every), every[at], at, bound)


def in_one_process() -> Iterator[Measured]:
    """Gradients of steps against those of one padded micro-batch of all examples, over every trainer and loss."""
    for layout in LAYOUTS:
        for tokens in CUTS:
            cut = _over({"layout": layout, "tokens": tokens})
            yield measured(f"{layout}, micro-batches of at most {tokens} tokens", cut, BOUND)
        reordered = _over({"layout": layout, "tokens": 80}, order=-1)
        yield measured(f"{layout}, rows the other way round", reordered, BOUND)
        yield measured(f"{layout}, another token for padding", _over({"layout": layout}, pad=17), BOUND)


def _over(options: Mapping[str, Any], order: int = 1, pad: int = 0) -> Iterator[tuple[str, float]]:
    for uses, loss in TRIED:
        made = stepper(uses, loss, **options)
        made.pad = pad
        found = gradient(made, examples(uses)[::order])[2]
        yield f"{uses}, {loss}", apart(found, plain(uses, loss)[2])


def of_models() -> Iterator[Measured]:
    """Log-probs of sequences in a layout against each sequence alone."""
    rows = laid_out.ragged()
    for layout in LAYOUTS.values():
        found = {}
        for config, attention in laid_out.MODELS:
            model = laid_out.build(config, attention)
            # Segments of a few tokens are cut into pieces as those of some hundred are.
            with torch.no_grad(), patch.object(blocks, "PIECE", 5):
                difference = laid_out.logp(model, layout, rows) - laid_out.alone(model, rows)
            found[f"{config.__name__}, {attention}"] = float(difference.abs().max())
        yield measured(layout.name, found.items(), LOG_PROBS)


def on_ranks(directory: Path) -> Iterator[Measured]:
    """Weights after an SGD step on two ranks against those of one process."""
    for name, backend in BACKENDS.items():
        (directory / name).mkdir()
        found: Mapping[str, Any] = in_own_process(compare_steps, directory / name, backend, CASES)
        yield measured(name, ((case, each["apart"]) for case, each in found.items()), BOUND)


def resumed(directory: Path) -> Iterator[Measured]:
    """Weights of trainings that were stopped and went on against those of trainings that were not."""
    for name, backend in TRAINED_ON.items():
        whole = in_own_process(training, _made(directory / name / "whole"), backend, {})["weights"]
        found = {}
        for stop in STOPS:
            parts = _made(directory / name / f"stopped-{stop}")
            first = in_own_process(training, parts, backend, {"stop_at": stop})
            if not first["interrupted"]:
                raise SystemExit(f"{name}: the training was not stopped after step {stop}")
            second = in_own_process(training, parts, backend, {})["weights"]
            gaps = [np.abs(second[each] - whole[each]).max() for each in whole]
            found[f"stopped after step {stop}"] = float(np.max(gaps))
        yield measured(name, found.items(), 0.0)


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True)
    return directory


def table(title: str, rows: Sequence[Measured]) -> list[str]:
    """Return the rows as a Markdown table."""
    return [
        f"| {title} | cases | largest difference | allowed | where |",
        "|---|---|---|---|---|",
        *(
            f"| {each.what} | {each.cases} | {each.largest:.1e} | {each.bound:.0e} | {each.at} |"
            for each in rows
        ),
        "",
    ]


def main() -> None:
    """Measure and write the evidence."""
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as directory:
        _made(Path(directory) / "steps")
        parts = {
            "in one process": list(in_one_process()),
            "models": list(of_models()),
            "ranks": list(on_ranks(Path(directory) / "steps")),
            "resumed": list(resumed(Path(directory) / "trainings")),
        }
    lines = [
        "Single precision, tiny models, ragged lengths and numbers of supervised tokens. What the suites assert below",
        "`tests/plugins` (`test_training_step.py`, `test_training_layouts_attention.py`, `test_training_resume.py`)",
        "and `tests/distributed` (`test_backend_steps.py`, `test_backend_trainings.py`) is measured here, with the",
        "same code.",
        "",
        "## One step, cut and laid out otherwise",
        "",
        f"Every registered trainer and loss, and losses of every kind of the contract: {len(TRIED)} pairs. Largest",
        "difference of the gradient to that of one padded micro-batch of all rows, of its largest element.",
        "",
        *table("layout", parts["in one process"]),
        "## Log-probs of a sequence among others",
        "",
        "Largest difference to the sequence alone; models of several architectures, with sliding windows and capped",
        "logits among them, `eager` and `sdpa`.",
        "",
        *table("layout", parts["models"]),
        "## One step on two ranks",
        "",
        "Weights after a step of SGD, beyond one unit in the last place, of the largest update of one process's step.",
        f"Cases: {', '.join(CASES)}.",
        "",
        *table("backend", parts["ranks"]),
        "## Stopped and resumed",
        "",
        f"Seven steps of AdamW, stopped after step {' or '.join(map(str, STOPS))}, against the same training that",
        "was not stopped: bit by bit.",
        "",
        *table("backend", parts["resumed"]),
    ]
    every = [each for rows in parts.values() for each in rows]
    over = [each.what for each in every if not each.largest <= each.bound]
    lines.append(f"Beyond what is allowed: {', '.join(over) or 'none'}.")
    results = {name: [vars(each) for each in rows] for name, rows in parts.items()}
    title = "The same step, however it is cut and shared"
    ledger.write("equality", title, "python -m tests.evidence equality", lines, results)


if __name__ == "__main__":
    main()
