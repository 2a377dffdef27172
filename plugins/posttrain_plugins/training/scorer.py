"""What the policy says about examples: forward passes over micro-batches, in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from posttrain.contracts.backend import Parallel
from posttrain.contracts.component import Component
from posttrain.contracts.loss import REFERENCES, Loss, Need
from posttrain.contracts.trainer import Example, Scores, Trainer
from posttrain_plugins.models.mode import evaluating
from posttrain_plugins.training.batches import Budget, Deal, deal
from posttrain_plugins.training.head import Head, Wanted, unwrapped
from posttrain_plugins.training.layouts import Layout
from posttrain_plugins.training.microbatch import MicroBatch
from posttrain_plugins.training.positions import reach, require_reach
from posttrain_plugins.training.processor import quick_products
from posttrain_plugins.training.way import computing


@dataclass
class Scorer:
    """Scores examples: what a loss's batch is made of.

    Args:
        model: The policy, possibly wrapped.
        trainer: Assembles the loss's batch.
        loss: The loss and its options.
        pad: A token id to pad with; which one is immaterial.
        budget: What a micro-batch may hold.
        head: How supervised positions get their log-probs.
        layout: How examples are laid out in rows.
        parallel: The ranks that share the step.
        precision: What to compute in (autocast); None: as the weights are.
        config: The trainer's options.
        reference: log π_ref by row, where it is needed: Σ over each sequence of the example, shape [sequences], or of
            each supervised token, where `Need.REFERENCE_TOKENS` is declared.
    """

    model: Any
    trainer: Trainer
    loss: Component
    pad: int
    budget: Budget
    head: Head
    layout: Layout
    parallel: Parallel
    precision: torch.dtype | None = None
    config: Any = None
    reference: Mapping[int, Tensor] | None = None

    @property
    def device(self) -> torch.device:
        """Where the policy is."""
        device: torch.device = self.parallel.device
        return device

    @cached_property
    def needs(self) -> frozenset[Need]:
        """What batches hold beside log-probs."""
        return self._loss.needs_of(self.loss.config) | self.trainer.needs(self.config)

    @property
    def wanted(self) -> Wanted:
        """What the head is asked for beside log-probs."""
        shown, needs = self.trainer.diagnostics, self.needs
        return Wanted(
            entropy=shown or Need.ENTROPY in needs,
            entropy_gradient=Need.ENTROPY in needs,
            top1=shown,
            squares=Need.SQUARES in needs,
            mean_logp=Need.MEAN_LOGP in needs,
        )

    def micro_batches(self, examples: Sequence[Example]) -> Iterator[MicroBatch]:
        """Cut examples and lay this rank's share out, one at a time."""
        return map(self._laid_out, self._dealt(examples).of(self.parallel.rank))

    def score(self, micro: MicroBatch) -> Scores:
        """Run the policy over a micro-batch."""
        with self.layout.attending(self.model, micro), computing(self.device, self.precision):
            found = self.head(self.model, micro, self.wanted)
        return self.referred(
            Scores(
                examples=micro.examples,
                logp=found.logp,
                entropy=found.entropy,
                top1=found.top1,
                sequence=micro.sequence,
                lengths=micro.lengths,
                weight=micro.weight,
                squares=found.squares,
                mean_logp=found.mean_logp,
                value=found.value,
                needs=self.needs,
            )
        )

    def referred(self, scores: Scores) -> Scores:
        """Return scores with what the reference says, where that is needed."""
        if self.reference is None or not self.needs & REFERENCES:
            return scores
        found = [self._referred(example, self.reference[example.row]) for example in scores.examples]
        told = torch.cat(found).to(self.device) if found else torch.zeros(0, device=self.device)
        if Need.REFERENCE_TOKENS not in self.needs:
            return replace(scores, reference=told)
        return replace(scores, reference=scores.sums(told), reference_logp=told)

    def _referred(self, example: Example, told: Tensor) -> Tensor:
        """Return what belongs to the sequences that are scored; those that are only measured stand last."""
        size = example.predicted if Need.REFERENCE_TOKENS in self.needs else len(example.sequences)
        return told[-size:] if example.sequences[0].measured else told[:size]

    def totals(self, examples: Sequence[Example], pause: Callable[[int], None]) -> dict[int, Tensor]:
        """Return Σ log π over the supervised tokens of each sequence, shape [sequences], float32, by row.

        Args:
            examples: Any number of them; every rank is given all and scores its share.
            pause: Called with the number of this rank's examples done; may raise to stop.
        """
        return self._told(examples, pause, [len(each.sequences) for each in examples], _sequence_sums)

    def log_probs(self, examples: Sequence[Example], pause: Callable[[int], None]) -> dict[int, Tensor]:
        """Return log π of the supervised tokens of each example, shape [tokens], float32, by row; see `totals`."""
        return self._told(examples, pause, [each.predicted for each in examples], attrgetter("logp"))

    def _told(
        self,
        examples: Sequence[Example],
        pause: Callable[[int], None],
        sizes: Sequence[int],
        read: Callable[[Scores], Tensor],
    ) -> dict[int, Tensor]:
        """Return what `read` finds in the scores, by row: so many numbers of each example, example by example."""
        ends = list(accumulate(sizes))
        place = {
            example.row: slice(end - size, end)
            for example, end, size in zip(examples, ends, sizes, strict=True)
        }
        found = torch.zeros(ends[-1] if ends else 0, device=self.device)
        done = 0
        with evaluating(self.model):
            for micro in self.micro_batches(examples):
                with self._quick(micro.tokens.numel()):
                    values = read(self.score(micro))
                places = [place[example.row] for example in micro.examples]
                for where, part in zip(
                    places, values.split([at.stop - at.start for at in places]), strict=True
                ):
                    found[where] = part
                done += len(places)
                pause(done)
        found = self.parallel.sum(found).cpu()
        return {row: found[where].clone() for row, where in place.items()}

    def _scored(self, part: Sequence[Example]) -> Scores:
        return self.score(self._laid_out(part))

    @property
    def _loss(self) -> Loss:
        loss: Loss = self.loss.plugin
        return loss

    def _laid_out(self, part: Sequence[Example]) -> MicroBatch:
        require_reach(self._reach, part)
        micro = self.layout.arrange(part, self.pad, self.device)
        assert len(micro.targets) == sum(example.predicted for example in part), (
            "the denominator must count exactly the tokens that are scored"
        )
        return micro

    def _dealt(self, examples: Sequence[Example]) -> Deal:
        return deal(examples, self.layout, self.budget, self.parallel.size)

    def _quick(self, tokens: int) -> AbstractContextManager[None]:
        """Speed up the matrix products of micro-batches of some tokens, where that is exact."""
        # transformers' own attention would lose more by it than the rest gains.
        own = unwrapped(self.model).config._attn_implementation == "sdpa"
        width = 0 if own else self._largest.shape[-1]
        return quick_products(self._largest, tokens * width * width)

    @cached_property
    def _reach(self) -> int | None:
        return reach(self.model)

    @cached_property
    def _largest(self) -> torch.nn.Parameter:
        parameters: Iterator[torch.nn.Parameter] = self.model.parameters()
        return max(parameters, key=lambda tensor: tensor.numel() if tensor.dim() > 1 else 0)


def _sequence_sums(scores: Scores) -> Tensor:
    """Return Σ log π of every sequence, shape [S]."""
    return scores.sums(scores.logp)
