"""What a step came to, added up over micro-batches and ranks. Nothing is read from the device before the end."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from posttrain.contracts.backend import Parallel
from posttrain.errors import StageError


@dataclass(frozen=True)
class StepResult:
    """What one step came to, on all ranks; the same on each.

    Args:
        loss: In nats.
        metrics: Those of the loss.
        tokens: How many the step had, padding left out.
        surprise: −log π of a supervised token, averaged over the step, in nats.
        gap: Largest |log π − log π_ref| of a sequence, in nats a token; None without a reference.
        suspects: Rows of the micro-batches whose loss is not finite.
    """

    loss: float
    metrics: Mapping[str, float]
    tokens: int
    surprise: float
    gap: float | None = None
    suspects: Sequence[int] = ()


@dataclass
class Tally:
    """Sums over one rank's micro-batches.

    Args:
        losses: Each micro-batch's share of the step's loss, with the rows it holds.
        surprises: Σ −log π of each micro-batch's supervised tokens.
        gaps: Largest gap to the reference of each micro-batch.
        sums: Σ of the finite values of each metric, by micro-batch.
        numbers: How many those are.
    """

    losses: list[tuple[Tensor, list[int]]] = field(default_factory=list)
    surprises: list[Tensor] = field(default_factory=list)
    gaps: list[Tensor] = field(default_factory=list)
    sums: dict[str, list[Tensor]] = field(default_factory=dict)
    numbers: dict[str, list[Tensor]] = field(default_factory=dict)

    def loss(self, share: Tensor, rows: list[int]) -> None:
        """Take in a micro-batch's share of the loss."""
        self.losses.append((share.detach().double(), rows))

    def metrics(self, values: Mapping[str, Tensor]) -> None:
        """Take in unreduced values; what is not finite is left out."""
        for name, found in values.items():
            finite = found.detach().isfinite()
            self.sums.setdefault(name, []).append(torch.where(finite, found.detach(), 0).double().sum())
            self.numbers.setdefault(name, []).append(finite.sum())

    def result(self, parallel: Parallel, tokens: int, supervised: int) -> StepResult:
        """Add up over ranks.

        Args:
            parallel: The ranks.
            tokens: Tokens of the step on all ranks.
            supervised: Supervised tokens of the step on all ranks.
        """
        every = gather(parallel, self._plain())
        sums: dict[str, float] = {}
        numbers: dict[str, float] = {}
        for one in every:
            for name, value in one["sums"].items():
                sums[name] = sums.get(name, 0.0) + value
                numbers[name] = numbers.get(name, 0.0) + one["numbers"][name]
        gaps = [gap for one in every for gap in one["gaps"]]
        return StepResult(
            loss=sum(one["loss"] for one in every),
            metrics={name: sums[name] / number for name, number in numbers.items() if number},
            tokens=tokens,
            surprise=sum(one["surprise"] for one in every) / max(supervised, 1),
            gap=max(gaps, default=None),
            suspects=sorted(row for one in every for row in one["suspects"]),
        )

    def _plain(self) -> dict[str, Any]:
        """Read everything from the device at once."""
        kept = [[share for share, _ in self.losses], self.surprises, self.gaps]
        kept += [*self.sums.values(), *self.numbers.values()]
        numbers = iter(_floats([value for values in kept for value in values]))
        losses, surprises, gaps, *metrics = [[next(numbers) for _ in values] for values in kept]
        named = [sum(values) for values in metrics]
        return {
            "loss": sum(losses),
            "suspects": [
                row
                for value, (_, rows) in zip(losses, self.losses, strict=True)
                if not math.isfinite(value)
                for row in rows
            ],
            "surprise": sum(surprises),
            "gaps": gaps,
            "sums": dict(zip(self.sums, named, strict=False)),
            "numbers": dict(zip(self.numbers, named[len(self.sums) :], strict=True)),
        }


def added(parallel: Parallel, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add named float64 tensors up over ranks. A rank without examples has none and learns of them here.

    Raises:
        StageError: Ranks have tensors of one name and different shapes.
    """
    shapes: dict[str, list[int]] = {}
    for own in gather(parallel, {name: list(value.shape) for name, value in sums.items()}):
        for name, shape in own.items():
            if shapes.setdefault(name, shape) != shape:
                raise StageError(
                    "what a loss measures must have the same shape in every part of a step",
                    where=f"stats `{name}`",
                    found=f"{shapes[name]} and {shape}",
                )
    zeros = {
        name: torch.zeros(shape, dtype=torch.float64, device=parallel.device)
        for name, shape in shapes.items()
    }
    return {name: parallel.sum(sums.get(name, zeros[name])) for name in sorted(shapes)}


def gather(parallel: Parallel, value: Any) -> list[Any]:
    """Return every rank's JSON value, by rank, on every rank."""
    if parallel.size == 1:
        return [value]
    own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = torch.zeros(parallel.size, dtype=torch.int64, device=parallel.device)
    sizes[parallel.rank] = len(own)
    lengths: list[int] = parallel.sum(sizes).tolist()
    texts = torch.zeros(parallel.size, max(lengths), dtype=torch.int32, device=parallel.device)
    texts[parallel.rank, : len(own)] = own.to(texts)
    rows = parallel.sum(texts).to(torch.uint8).cpu()
    return [json.loads(bytes(row[:length].tolist())) for row, length in zip(rows, lengths, strict=True)]


def _floats(values: Sequence[Tensor]) -> list[float]:
    found: list[float] = torch.stack([value.double() for value in values]).tolist() if values else []
    return found
