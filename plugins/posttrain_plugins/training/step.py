"""One optimizer step's forwards, reduction and backwards, in plain torch.

The denominators of the whole step, on all ranks, are known before its first backward, so neither the cut into
micro-batches nor the deal to ranks changes the loss or the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from posttrain.contracts.loss import REFERENCES, LossOutput, Need, Scope, State, Stats, Undeclared
from posttrain.contracts.reduction import Counts, Part
from posttrain.contracts.trainer import Example, Scores
from posttrain.errors import StageError
from posttrain_plugins.models.mode import evaluating
from posttrain_plugins.training.batches import Budget, Deal
from posttrain_plugins.training.memory import out_of_memory, short_of_memory
from posttrain_plugins.training.randomness import Replay
from posttrain_plugins.training.scorer import Scorer
from posttrain_plugins.training.tally import StepResult, Tally, added
from posttrain_plugins.training.whole import joined, slopes

Pause = Callable[[int, int], None]
"""Called with how many examples are done, and of how many."""


def unheard(done: int, total: int) -> None:
    """Stand in where nobody wants to know."""


@dataclass
class Stepper(Scorer):
    """Scores examples and back-propagates the loss of a whole step.

    Args:
        scale: Scales the loss before it is back-propagated, for float16.
        smaller: Told of the new budget when memory ran out.
        state: What the loss remembers from step to step.
    """

    scale: Callable[[Tensor], Tensor] | None = None
    smaller: Callable[[Budget], None] = lambda budget: None
    state: State = field(init=False)

    def __post_init__(self) -> None:
        self.state = self._loss.begin(self.loss.config)

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

    def evaluate(self, examples: Sequence[Example], pause: Pause = unheard) -> StepResult:
        """Return what a step of these examples would come to; no gradient, no dropout, no change of state.

        Args:
            examples: Those of all ranks.
            pause: Called on every rank after each micro-batch, with the examples that all ranks have done and the
                number of all; may raise to stop, on all ranks at once.

        Raises:
            StageError: Memory ran out.
        """
        with short_of_memory("an evaluation"), evaluating(self.model):
            return self._step(examples, learn=False, pause=pause)

    def _halve(self, examples: Sequence[Example], lacking: str) -> None:
        """Halve the budget, if this rank can start the step again and there is something to halve."""
        rounds = [each for kind in self._kinds(examples) for each in self._dealt(kind).rounds]
        parts = [part for each in rounds for part in each]
        tokens = min(self.budget.tokens, max(map(self.layout.size, parts)))
        found = f"micro_batch_tokens {tokens}; {lacking.splitlines()[0] if lacking else 'no details'}"
        if max(map(len, parts)) == 1:
            raise StageError(
                "memory ran out",
                where="a micro-batch of one example",
                found=found,
                fix="use gradient_checkpointing or a shorter max_length",
            )
        self.budget = replace(self.budget, tokens=tokens).half
        self.smaller(self.budget)
        if not self.parallel.repeatable:
            raise StageError(
                "memory ran out",
                where=f"a step of {len(examples)} examples",
                found=found,
                fix="`posttrain resume` goes on from the last checkpoint with half of that",
            )

    def _kinds(self, examples: Sequence[Example]) -> tuple[list[Example], list[Example]]:
        """Return what is learned of a step, and what is only measured, in a pass of its own without gradient.

        A loss that sees the whole step sees both together.
        """
        if self._loss.scope is Scope.STEP:
            return list(examples), []
        learned, asked = [example.learned for example in examples], Need.MISMATCHED in self.needs
        return learned, [each for example in examples if asked and (each := example.measured) is not None]

    def _step(self, examples: Sequence[Example], learn: bool, pause: Pause = unheard) -> StepResult:
        learned, measured = self._kinds(examples)
        dealt, tally, replay = self._dealt(learned), Tally(), Replay(self.device)
        parts = dealt.of(self.parallel.rank)
        apart = self._dealt(measured).of(self.parallel.rank) if measured else []
        with self._quick(max(map(self.layout.size, [*parts, *apart]))):
            if self._loss.scope is Scope.STEP:
                state = self._as_a_whole(dealt, parts, replay, tally, learn, pause)
            else:
                state = self._part_by_part(dealt, parts, apart, replay, tally, learn, pause)
        if learn:
            self.state = state
        return tally.result(
            self.parallel,
            tokens=sum(example.size for example in examples),
            supervised=dealt.counts.tokens,
        )

    def _part_by_part(
        self,
        dealt: Deal,
        parts: Sequence[Sequence[Example]],
        apart: Sequence[Sequence[Example]],
        replay: Replay,
        tally: Tally,
        learn: bool,
        pause: Pause,
    ) -> State:
        """Call the loss on each micro-batch; measure the whole step first where the loss asks for that."""
        kept: dict[int, Scores] = {}
        stats: Stats = {}
        if Need.MISMATCHED in self.needs:
            # Answers of other rows are all that such a loss measures; where there are none, there is nothing to score.
            if apart:
                stats = self._measured(apart, Replay(self.device), {}, partial(pause, 0, len(dealt.examples)))
        elif self._loss.measures:
            # A step of one micro-batch a rank is scored once; what it measures is taken from the same scores.
            if len(parts) == 1:
                kept[0] = self._scored(parts[0])
            stats = self._measured(parts, replay, kept, partial(pause, 0, len(dealt.examples)))
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
            pause(dealt.done(index + 1), len(dealt.examples))
        return state

    def _as_a_whole(
        self,
        dealt: Deal,
        parts: Sequence[Sequence[Example]],
        replay: Replay,
        tally: Tally,
        learn: bool,
        pause: Pause,
    ) -> State:
        """Call the loss once on the scores of all ranks; then back-propagate Σ (dL/ds)·s part by part."""
        found: list[Scores] = []
        with torch.no_grad():
            for index, part in enumerate(parts):
                found.append(replay.first(index, partial(self._scored, part)))
                pause(dealt.done(index + 1), len(dealt.examples))
        whole = self.referred(joined(dealt, found, self.parallel, self.wanted, self.needs))
        with torch.no_grad(), self._named():
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
        self,
        parts: Sequence[Sequence[Example]],
        replay: Replay,
        kept: Mapping[int, Scores],
        pause: Callable[[], None],
    ) -> dict[str, Tensor]:
        """Return the loss's sums over the whole step and all ranks; the loss is shown no part without examples."""
        sums: dict[str, Tensor] = {}
        with torch.no_grad():
            for index, part in enumerate(parts):
                scores = kept.get(index) or replay.first(index, partial(self._scored, part))
                pause()
                if not part:
                    continue
                with self._named():
                    found = self._loss.measure(self._batch(scores), self.loss.config, self.state)
                for name, value in found.items():
                    sums[name] = sums.get(name, 0) + value.detach().to(self.device, torch.float64)
        return added(self.parallel, sums)

    def _advanced(self, stats: Stats, learn: bool) -> State:
        return self._loss.advance(self.state, stats, self.loss.config) if learn else self.state

    def _called(self, scores: Scores, stats: Stats, state: State) -> LossOutput:
        with self._named():
            output: Any = self._loss(self._batch(scores), self.loss.config, stats, state)
        if not isinstance(output, LossOutput):
            raise StageError(
                "the loss returns something else than terms",
                where=f"loss `{self.loss.name}`",
                found=f"a {type(output).__name__}",
                expected="a `LossOutput`",
                fix="return `LossOutput([Term(values, REDUCTION)], metrics)`, with unreduced values",
            )
        return output

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Let an error about what a loss reads and does not declare name the loss."""
        try:
            yield
        except Undeclared as error:
            raise error.of(self.loss.name) from error

    def _batch(self, scores: Scores) -> Any:
        known = scores.reference is not None or not self.needs & REFERENCES
        assert known, "the reference is scored before the loss is called"
        return self.trainer.batch(scores, self.config)

    def _backward(self, share: Tensor, last: bool) -> None:
        # Ranks average their gradients, and the shares are parts of a sum.
        share = share * self.parallel.size
        with self._named():
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
                    fix="return one value for each, unreduced: the reduction of the term adds them up",
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
