"""What trainers on preference pairs share: two answers to one prompt, and the batch that their losses take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from posttrain.contracts.format import Format
from posttrain.contracts.loss import AnswerTokens, Family, Need, PreferenceBatch
from posttrain.contracts.passage import Passage
from posttrain.contracts.stage import Finding, Inputs
from posttrain.contracts.trainer import Scores
from posttrain_plugins.trainers.pair_verdicts import fields_of, missing_columns, numbers_of
from posttrain_plugins.training.objective import known_needs
from posttrain_plugins.training.offline import OfflineTrainer
from posttrain_plugins.training.options import EVALUATION

if TYPE_CHECKING:
    from torch import Tensor


class PairTrainer(OfflineTrainer):
    """Base of trainers on pairs. Dropout is off, so that a policy and its reference agree until the first update."""

    family = Family.PREFERENCE
    formats = frozenset({"preference", "token_pairs"})
    dropout = False
    sequences = 2

    def check(self, config: Any, inputs: Inputs) -> Iterable[Finding]:
        """Report columns that a loss needs and the rows have not."""
        yield from super().check(config, inputs)
        needs = known_needs(self, config) or frozenset()
        for port in ("data", EVALUATION):
            for data in inputs.get(port, ()):
                yield from missing_columns(needs, port, data)

    def passages(
        self, row: Mapping[str, Any], format: Format, needs: frozenset[Need]
    ) -> Sequence[Passage] | str:
        """The two answers to one prompt, unless they are the same."""
        if row["chosen"] == row["rejected"]:
            return "chosen and rejected are the same"
        return format.passages(row)

    def verdicts(self, row: Mapping[str, Any], format: Format, needs: frozenset[Need]) -> Sequence[float]:
        """Who wrote the answers, and how sure the preference is, where a loss needs it."""
        return numbers_of(row, needs)

    def batch(self, scores: Scores, config: Any) -> PreferenceBatch:
        """Sum the log-probs of each side."""
        chosen, rejected = scores.totals(scores.logp).unbind(1)
        chosen_tokens, rejected_tokens = scores.lengths.to(chosen).view(-1, 2).unbind(1)
        reference: Any = (None, None)
        if scores.reference is not None:
            reference = scores.reference.view(-1, 2).unbind(1)
        return PreferenceBatch(
            chosen=chosen,
            rejected=rejected,
            reference_chosen=reference[0],
            reference_rejected=reference[1],
            chosen_tokens=chosen_tokens,
            rejected_tokens=rejected_tokens,
            weight=scores.weight,
            tokens=answer_tokens(scores),
            **fields_of(scores),
        )


def answer_tokens(scores: Scores) -> AnswerTokens:
    """Return the supervised tokens of all answers, with where each belongs."""
    first: Tensor = scores.lengths.cumsum(0) - scores.lengths
    told = {"reference": scores.reference_logp, "squares": scores.squares}
    places = scores.sequence.new_ones(len(scores.logp)).cumsum(0) - 1
    return AnswerTokens(
        logp=scores.logp,
        example=scores.sequence // scores.width,
        answer=scores.sequence % scores.width,
        place=places - first[scores.sequence],
        **{name: value for name, value in told.items() if value is not None},
    )
