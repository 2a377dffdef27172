"""Kahneman-Tversky optimization, and other losses over answers that are good or bad."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from posttrain.contracts.component import Choice, Uses
from posttrain.contracts.format import Format, Row
from posttrain.contracts.loss import REFERENCES, Absent, Family, Need, UnpairedBatch
from posttrain.contracts.passage import Passage
from posttrain.contracts.registration import Group
from posttrain.contracts.stage import Finding, Inputs
from posttrain.contracts.trainer import Example, Scores
from posttrain.errors import DataError
from posttrain_plugins.data.formats.passages import passage_of
from posttrain_plugins.data.formats.preference import label_problem
from posttrain_plugins.data.judging.labels import LABELLED
from posttrain_plugins.preparation.mismatched import COLUMN, MISMATCHED, with_mismatched
from posttrain_plugins.trainers.reference_free import WithoutDropout
from posttrain_plugins.trainers.referenced import ReferencedOptions, gap_problems, sync_findings
from posttrain_plugins.training.offline import OfflineTrainer

if TYPE_CHECKING:
    from torch import Tensor

COMPLETION = "completion"
_UNKNOWN: Any = None
"""What no loss has asked for."""
_UNCOMPARED: Any = Absent(Need.REFERENCE, "reference_mismatched")


class KtoOptions(ReferencedOptions, WithoutDropout):
    """Options of `train.kto`."""

    learning_rate: float = Field(default=1e-6, gt=0, description="peak learning rate")
    loss: Annotated[Choice, Uses(Group.LOSS, having=(("family", Family.UNPAIRED),))] = Field(
        default=Choice(name="kto"), description="a loss over answers that are good or bad"
    )


class Kto(OfflineTrainer):
    """Train on answers that are good or bad (Ethayarajh et al. 2024, https://arxiv.org/abs/2402.01306).

    The reference is the exact starting policy, continued adapters included; dropout is off, so that the two agree
    until the first update. A loss that estimates the KL divergence gets, for every prompt, the answer of another row:
    which one is drawn from the dataset once, with `seed`.
    """

    config = KtoOptions
    family = Family.UNPAIRED
    formats = frozenset({"unpaired_preference"})
    dropout = False
    referenced = True
    sequences = 2

    def check(self, config: KtoOptions, inputs: Inputs) -> Iterable[Finding]:
        """Report what a reference that follows the policy does not go together with, beside what all trainers do."""
        yield from super().check(config, inputs)
        yield from sync_findings(self, config, inputs)

    def rows(self, rows: Iterable[Row], format: Format, needs: frozenset[Need], seed: int) -> Iterable[Row]:
        """Give each row another row's answer, where the loss needs it."""
        return with_mismatched(list(rows), seed) if Need.MISMATCHED in needs else rows

    def passages(self, row: Row, format: Format, needs: frozenset[Need]) -> Sequence[Passage] | str:
        """The answer, and behind it another row's answer to the same prompt."""
        if COLUMN not in row:
            return format.passages(row)
        other = passage_of(row, MISMATCHED, row["prompt"], row[COLUMN])
        return (*format.passages(row), replace(other, measured=True))

    def verdicts(self, row: Row, format: Format, needs: frozenset[Need]) -> Sequence[float]:
        """1 for a good answer, 0 for a bad one."""
        problem = label_problem(row)
        if problem:
            raise DataError(problem)
        return (float(row["label"]),)

    def remarks(self, examples: Sequence[Example]) -> Sequence[str]:
        """Say so where all rows are on one side, or all answers are the same."""
        labels = (example.verdicts[0] for example in examples)
        found = LABELLED["unpaired_preference"].remarks(labels)
        if len(examples) > 1 and _alike(examples):
            found.append(
                "all rows have the same answer; a loss that estimates the KL divergence takes it for 0"
            )
        return found

    def batch(self, scores: Scores, config: Any) -> UnpairedBatch:
        """Sum the log-probs of each answer. Of what is not scored in this pass nothing is known: NaN, or None."""
        answers = _by_role(scores)
        unknown = (scores.weight.new_full((len(scores.examples),), float("nan")),) * 3
        logp, reference, tokens = answers.get(COMPLETION, unknown)
        compared = bool(scores.needs & REFERENCES)
        other: Any = None
        other_reference: Any = None
        if Need.MISMATCHED in scores.needs:
            other, other_reference, other_tokens = answers.get(MISMATCHED, unknown)
            other = other.masked_fill(other_tokens.eq(0), float("nan"))
        return UnpairedBatch(
            logp=logp,
            reference=reference if compared else _UNKNOWN,
            tokens=tokens,
            desirable=scores.verdicts > 0.5,
            weight=scores.weight,
            mismatched=other,
            reference_mismatched=other_reference if compared or other is None else _UNCOMPARED,
        )

    def invariants(self, metrics: Mapping[str, float], config: KtoOptions) -> Sequence[str]:
        """Before any update the policy is its own reference."""
        return gap_problems(metrics, config.precision)


def _alike(examples: Sequence[Example]) -> bool:
    """Whether the same tokens are learned in all rows."""
    first = _answer(examples[0])
    return all(_answer(example) == first for example in examples)


def _answer(example: Example) -> list[int]:
    own = example.sequences[0]
    return list(compress(own.tokens, own.supervised))


def _by_role(scores: Scores) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Return log-probs, those of the reference and the numbers of tokens of each role's answers, shape [U] each."""
    totals = scores.totals(scores.logp)
    reference = scores.logp.new_zeros(totals.shape)
    if scores.reference is not None:
        reference = scores.reference.view(totals.shape)
    tokens = scores.lengths.to(scores.logp).view(totals.shape)
    columns = zip(totals.unbind(1), reference.unbind(1), tokens.unbind(1), strict=True)
    roles = [sequence.role for sequence in scores.examples[0].sequences]
    return dict(zip(roles, columns, strict=True))
