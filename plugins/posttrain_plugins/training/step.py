"""One optimizer step's forwards, reduction and backwards, in plain torch.

The denominators of the whole step, on all ranks, are known before its first backward, so neither the cut into
micro-batches nor the deal to ranks changes the loss or the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from posttrain.contracts.backend import Parallel
from posttrain.contracts.component import Component
from posttrain.contracts.loss import Loss, LossOutput, Need, Scope, State, Stats
from posttrain.contracts.reduction import Counts, Part
from posttrain.contracts.trainer import Example, Scores, Trainer
from posttrain.errors import StageError
from posttrain_plugins.models.mode import evaluating
from posttrain_plugins.training.batches import Budget, Deal, deal
from posttrain_plugins.training.head import Head, Wanted, unwrapped
from posttrain_plugins.training.layouts import Layout
from posttrain_plugins.training.memory import out_of_memory
from posttrain_plugins.training.microbatch import MicroBatch
from posttrain_plugins.training.processor import quick_products
from posttrain_plugins.training.randomness import Replay
from posttrain_plugins.training.tally import StepResult, Tally, added
from posttrain_plugins.training.whole import joined, slopes

REFERENCES = frozenset({Need.REFERENCE, Need.REFERENCE_TOKENS})
"""What has to be known of the reference."""


@dataclass
class Stepper:
    """Scores examples and back-propagates the loss of a whole step.

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
        scale: Scales the loss before it is back-propagated, for float16.
        smaller: Told of the new budget when memory ran out.
        state: What the loss remembers from step to step.
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
    scale: Callable[[Tensor], Tensor] | None = None
    smaller: Callable[[Budget], None] = lambda budget: None
    state: State = field(init=False)

    def __post_init__(self) -> None:
        self.state = self._loss.begin(self.loss.config)

    @property
    def device(self) -> torch.device:
        """Where the policy is."""
        return self.parallel.device

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
        )

    def backward(self, examples: Sequence[Example]) -> StepResult:
        """Give the parameters the gradient of the step's loss; they must have none before.

        When memory runs out, the step starts again with half the budget, or half of what it took where that is less.

        Args:
            examples: All examples of the step; every rank is given all of them and takes its share.

        Raises:
            StageError: The loss returns terms that do not fit its batch or have no gradient; or memory ran out
                and the budget cannot be halved here.
        """
        before = Replay(self.device)
        while True:
            lacking = ""
            try:
                return before.first(0, lambda: self._step(examples, learn=True))
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                lacking = str(error)
            # Here, where the exception no longer holds the tensors of the failed step.
            self._halve(examples, lacking)
            self.model.zero_grad()
            before.rewind(0)

    def evaluate(self, examples: Sequence[Example]) -> StepResult:
        """Return what a step of these examples would come to; no gradient, no dropout, no change of state."""
        with evaluating(self.model):
            return self._step(examples, learn=False)

    def micro_batches(self, examples: Sequence[Example]) -> Iterator[MicroBatch]:
        """Cut examples and lay this rank's share out, one at a time."""
        dealt = deal(examples, self.layout, self.budget, self.parallel.size)
        return map(self._laid_out, dealt.of(self.parallel.rank))

    def score(self, micro: MicroBatch) -> Scores:
        """Run the policy over a micro-batch."""
        with self.layout.attending(self.model, micro), self._autocast():
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
                value=found.value,
            )
        )

    def referred(self, scores: Scores) -> Scores:
        """Return scores with what the reference says, where that is needed."""
        if self.reference is None or not self.needs & REFERENCES:
            return scores
        found = [self.reference[example.row] for example in scores.examples]
        told = torch.cat(found).to(self.device) if found else torch.zeros(0, device=self.device)
        if Need.REFERENCE_TOKENS not in self.needs:
            return replace(scores, reference=told)
        sums = told.new_zeros(len(scores.lengths)).index_add(0, scores.sequence, told)
        return replace(scores, reference=sums, reference_logp=told)

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

    def _halve(self, examples: Sequence[Example], lacking: str) -> None:
        """Halve the budget, if this rank can start the step again and there is something to halve."""
        dealt = deal(examples, self.layout, self.budget, self.parallel.size)
        largest = max(self.layout.size(part) for parts in dealt.rounds for part in parts)
        tokens = min(self.budget.tokens, largest)
        self.budget = replace(self.budget, tokens=tokens).half
        self.smaller(self.budget)
        stops = not self.parallel.repeatable
        if stops or tokens == 1:
            raise StageError(
                "memory ran out",
                where=f"a step of {len(examples)} examples" if stops else "a micro-batch of one example",
                found=f"micro_batch_tokens {tokens}; {lacking.splitlines()[0] if lacking else 'no details'}",
                fix="`posttrain resume` goes on from the last checkpoint with half of that"
                if stops
                else "use gradient_checkpointing or a shorter max_length",
            )

    def _laid_out(self, part: Sequence[Example]) -> MicroBatch:
        micro = self.layout.arrange(part, self.pad, self.device)
        assert len(micro.targets) == sum(example.predicted for example in part), (
            "the denominator must count exactly the tokens that are scored"
        )
        return micro

    def _step(self, examples: Sequence[Example], learn: bool) -> StepResult:
        dealt = deal(examples, self.layout, self.budget, self.parallel.size)
        parts, tally, replay = dealt.of(self.parallel.rank), Tally(), Replay(self.device)
        run = self._as_a_whole if self._loss.scope is Scope.STEP else self._part_by_part
        with self._quick(max(map(self.layout.size, parts))):
            state = run(dealt, parts, replay, tally, learn)
        if learn:
            self.state = state
        return tally.result(
            self.parallel,
            tokens=sum(example.size for example in examples),
            supervised=dealt.counts.tokens,
        )

    def _part_by_part(
        self, dealt: Deal, parts: Sequence[Sequence[Example]], replay: Replay, tally: Tally, learn: bool
    ) -> State:
        """Call the loss on each micro-batch; measure the whole step first where the loss asks for that."""
        kept: dict[int, Scores] = {}
        stats: Stats = {}
        if self._loss.measures:
            # A step of one micro-batch a rank is scored once; what it measures is taken from the same scores.
            if len(parts) == 1:
                kept[0] = self._scored(parts[0])
            stats = self._measured(parts, replay, kept)
        state = self._advanced(stats, learn)
        for index, part in enumerate(parts):
            scores = kept.pop(index) if index in kept else replay.again(index, partial(self._scored, part))
            if part:
                output = self._called(scores, stats, state)
                share = self._total(output, scores, dealt.counts, learn)
                tally.metrics(output.metrics)
            else:
                share = (scores.logp if scores.value is None else scores.value).sum() * 0
            tally.loss(share, [example.row for example in part])
            self._observe(scores, tally)
            if learn:
                self._backward(share, last=index == len(parts) - 1)
        return state

    def _as_a_whole(
        self, dealt: Deal, parts: Sequence[Sequence[Example]], replay: Replay, tally: Tally, learn: bool
    ) -> State:
        """Call the loss once on the scores of all ranks; then back-propagate Σ (dL/ds)·s part by part."""
        with torch.no_grad():
            found = [replay.first(index, partial(self._scored, part)) for index, part in enumerate(parts)]
        whole = self.referred(joined(dealt, found, self.parallel, self.wanted))
        with torch.no_grad():
            measured = self._loss.measure(self._batch(whole), self.loss.config, self.state)
        stats = {name: value.double() for name, value in measured.items()}
        state = self._advanced(stats, learn)
        with torch.enable_grad():
            output = self._called(whole, stats, state)
            total = self._total(output, whole, dealt.counts, learn)
        if self.parallel.rank == 0:
            tally.loss(total, [example.row for example in whole.examples])
            tally.metrics(output.metrics)
        for scores in found:
            self._observe(scores, tally)
        if learn:
            pieces = slopes(total, whole, dealt, self.parallel.rank)
            for index, (part, piece) in enumerate(zip(parts, pieces, strict=True)):
                scores = replay.again(index, partial(self._scored, part))
                self._backward(piece.times(scores), last=index == len(parts) - 1)
        return state

    def _measured(
        self, parts: Sequence[Sequence[Example]], replay: Replay, kept: Mapping[int, Scores]
    ) -> dict[str, Tensor]:
        """Return the loss's sums over the whole step and all ranks; the loss is shown no part without examples."""
        sums: dict[str, Tensor] = {}
        with torch.no_grad():
            for index, part in enumerate(parts):
                scores = kept.get(index) or replay.first(index, partial(self._scored, part))
                if not part:
                    continue
                found = self._loss.measure(self._batch(scores), self.loss.config, self.state)
                for name, value in found.items():
                    sums[name] = sums.get(name, 0) + value.detach().to(self.device, torch.float64)
        return added(self.parallel, sums)

    def _advanced(self, stats: Stats, learn: bool) -> State:
        return self._loss.advance(self.state, stats, self.loss.config) if learn else self.state

    def _called(self, scores: Scores, stats: Stats, state: State) -> LossOutput:
        output: LossOutput = self._loss(self._batch(scores), self.loss.config, stats, state)
        return output

    def _batch(self, scores: Scores) -> Any:
        return self.trainer.batch(scores, self.config)

    def _backward(self, share: Tensor, last: bool) -> None:
        # Ranks average their gradients, and the shares are parts of a sum.
        share = share * self.parallel.size
        self.parallel.backward(share if self.scale is None else self.scale(share), last)

    def _total(self, output: LossOutput, scores: Scores, counts: Counts, learn: bool) -> Tensor:
        """Σ over terms of weight · this part's share of the step's reduced values."""
        part = Part(scores.sequence, scores.lengths, len(scores.examples), counts)
        total = scores.logp.new_zeros(())
        for number, term in enumerate(output.terms):
            where = f"loss `{self.loss.name}`, term {number}"
            allowed = [(part.sizes[unit],) for unit in term.reduction.over]
            if tuple(term.values.shape) not in allowed:
                raise StageError(
                    "the term's values do not fit its reduction",
                    where=where,
                    found=f"shape {tuple(term.values.shape)}",
                    expected=" or ".join(f"{part.sizes[unit]} {unit}" for unit in term.reduction.over)
                    + f", for {term.reduction}",
                )
            if learn and not term.values.requires_grad:
                raise StageError(
                    "the term has no gradient", where=where, fix="do not detach the policy's log-probs"
                )
            total = total + term.weight * term.reduction.total(term.values, part)
        if not output.terms:
            raise StageError("the loss has no terms", where=f"loss `{self.loss.name}`")
        return total

    def _observe(self, scores: Scores, tally: Tally) -> None:
        if scores.value is not None:
            return
        logp = scores.logp.detach()
        tally.surprises.append(-logp.double().sum())
        if scores.reference is not None and scores.examples:
            gaps = (scores.totals(logp).flatten() - scores.reference).abs() / scores.lengths.clamp(min=1)
            # The loss is not finite where a log-prob is not, so no gap that matters is NaN.
            tally.gaps.append(gaps.max())

    def _quick(self, tokens: int) -> AbstractContextManager[None]:
        """Speed up the matrix products of micro-batches of some tokens, where that is exact."""
        # transformers' own attention would lose more by it than the rest gains.
        own = unwrapped(self.model).config._attn_implementation == "sdpa"
        width = 0 if own else self._largest.shape[-1]
        return quick_products(self._largest, tokens * width * width)

    @cached_property
    def _largest(self) -> torch.nn.Parameter:
        return max(self.model.parameters(), key=lambda tensor: tensor.numel() if tensor.dim() > 1 else 0)

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(
            self.device.type, dtype=self.precision or torch.bfloat16, enabled=self.precision is not None
        )


def _sequence_sums(scores: Scores) -> Tensor:
    """Return Σ log π of every sequence, shape [S]."""
    return scores.logp.new_zeros(len(scores.lengths)).index_add(0, scores.sequence, scores.logp)
