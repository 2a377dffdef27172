"""One optimizer step's forwards, reduction and backwards, in plain torch.

The denominators of the whole step are known before its first backward, so cutting the step into micro-batches
changes neither the loss nor the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from posttrain.contracts.component import Component
from posttrain.contracts.loss import LossOutput, Reduction
from posttrain.contracts.trainer import Example, Scores, Trainer
from posttrain.errors import StageError
from posttrain_plugins.training.batches import MicroBatch, collate, cut, predicted
from posttrain_plugins.training.head import Head, budget_of, choose_head, selected_logits, token_log_probs


@dataclass
class Averages:
    """Running means of metrics, without values that are not finite and metrics without values."""

    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Take in unreduced values."""
        for name, values in metrics.items():
            kept = values.detach()[values.isfinite()]
            self.sums[name] = self.sums.get(name, 0.0) + float(kept.double().sum())
            self.counts[name] = self.counts.get(name, 0) + kept.numel()

    def means(self) -> dict[str, float]:
        """Return the mean of each metric."""
        return {name: self.sums[name] / count for name, count in self.counts.items() if count}


@dataclass(frozen=True)
class StepResult:
    """What one step came to.

    Args:
        loss: In nats.
        metrics: Those of the loss.
        tokens: How many the step had, padding left out.
        surprise: −log π of a supervised token, averaged over the step, in nats.
        gap: Largest |log π − log π_ref| of a sequence, in nats a token; None without a reference.
    """

    loss: float
    metrics: Mapping[str, float]
    tokens: int
    surprise: float
    gap: float | None = None


@dataclass
class Stepper:
    """Scores examples and back-propagates the loss of a whole step.

    Args:
        model: The policy, possibly wrapped.
        trainer: Assembles the loss's batch.
        loss: The loss and its options.
        pad: A token id to pad with; which one is immaterial.
        budget: Tokens of a micro-batch, padding included; logits bound it too (`head.budget_of`).
        bf16: Compute in bfloat16 (autocast).
        reference: Σ log π_ref of each example's sequences, shape [sequences], by row; where the loss needs
            it.
        head: How supervised positions get their logits.
    """

    model: Any
    trainer: Trainer
    loss: Component
    pad: int
    budget: int
    bf16: bool = False
    reference: Mapping[int, Tensor] | None = None
    head: Head = selected_logits

    @property
    def device(self) -> torch.device:
        """Where the policy is."""
        device: torch.device = next(self.model.parameters()).device
        return device

    def choose_head(self, probe: Sequence[Example], tolerance: float) -> str | None:
        """Try the fast head on a few examples; return what to tell the user when it had to be given up."""
        with self._autocast():
            self.head, told = choose_head(self.model, collate(probe, self.pad, self.device), tolerance)
        return told

    def micro_batches(self, examples: Sequence[Example]) -> Iterator[MicroBatch]:
        """Cut and pad examples, the longest first."""
        budget = budget_of(self.model, self.head, self.budget)
        return (collate(part, self.pad, self.device) for part in cut(examples, budget))

    def score(self, micro: MicroBatch) -> Scores:
        """Run the policy over a micro-batch."""
        with self._autocast():
            logits = self.head(self.model, micro)
        logp, entropy, top1 = token_log_probs(logits, micro.targets, self.trainer.diagnostics)
        return Scores(
            micro.examples, logp, entropy, top1, micro.sequence, micro.weight, self._reference(micro)
        )

    def backward(self, examples: Sequence[Example]) -> StepResult:
        """Add the gradient of the step's loss to the parameters' `.grad`.

        Raises:
            StageError: The loss returns terms that do not fit its batch or have no gradient.
        """
        tokens = sum(map(predicted, examples))
        denominators = {Reduction.TOKEN_MEAN: tokens, Reduction.SEQUENCE_MEAN: len(examples)}
        loss, surprise, averages, scored = 0.0, 0.0, Averages(), 0
        gaps: list[float] = []
        for micro in self.micro_batches(examples):
            scores = self.score(micro)
            output: LossOutput = self.loss.plugin(self.trainer.batch(scores), self.loss.config)
            total = self._total(output, scores, denominators)
            torch.autograd.backward(total)
            loss += float(total.detach().double())
            averages.add(output.metrics)
            surprise -= float(scores.logp.detach().double().sum())
            if scores.reference is not None:
                gaps.append(_gap(scores, scores.reference))
            scored += len(scores.logp)
        assert scored == tokens, "the denominator must count exactly the tokens that were scored"
        seen = sum(len(sequence.tokens) for example in examples for sequence in example.sequences)
        # The loss is not finite where a log-prob is not, so no gap that matters is NaN.
        return StepResult(loss, averages.means(), seen, surprise / tokens, max(gaps, default=None))

    def _total(self, output: LossOutput, scores: Scores, denominators: Mapping[Reduction, int]) -> Tensor:
        """Σ over terms of weight · Σ values / denominator of the whole step."""
        sizes = {Reduction.TOKEN_MEAN: len(scores.logp), Reduction.SEQUENCE_MEAN: len(scores.examples)}
        total = scores.logp.new_zeros(())
        for number, term in enumerate(output.terms):
            where = f"loss `{self.loss.name}`, term {number}"
            if term.values.shape != (sizes[term.reduction],):
                raise StageError(
                    "the term's values do not fit its reduction",
                    where=where,
                    found=f"shape {tuple(term.values.shape)}",
                    expected=f"shape ({sizes[term.reduction]},) for {term.reduction}",
                )
            if not term.values.requires_grad:
                raise StageError(
                    "the term has no gradient", where=where, fix="do not detach the policy's log-probs"
                )
            total = total + term.weight * term.values.sum() / denominators[term.reduction]
        if not output.terms:
            raise StageError("the loss has no terms", where=f"loss `{self.loss.name}`")
        return total

    def _reference(self, micro: MicroBatch) -> Tensor | None:
        if self.reference is None:
            return None
        return torch.cat([self.reference[example.row] for example in micro.examples]).to(self.device)

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16)


def _gap(scores: Scores, reference: Tensor) -> float:
    """Return the largest |log π − log π_ref| of a sequence, in nats a token."""
    logp = scores.logp.detach()
    counts = scores.totals(torch.ones_like(logp)).flatten().clamp(min=1)
    return float(((scores.totals(logp).flatten() - reference).abs() / counts).max())
