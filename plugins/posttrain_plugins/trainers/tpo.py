"""Triple preference optimization: pairs beside a gold answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from posttrain.contracts.component import Choice, Uses
from posttrain.contracts.format import Format
from posttrain.contracts.loss import Family, Need, ThreeWayBatch
from posttrain.contracts.passage import Passage
from posttrain.contracts.registration import Group
from posttrain.contracts.trainer import Scores
from posttrain_plugins.trainers.reference_free import WithoutDropout
from posttrain_plugins.training.offline import OfflineTrainer


class TpoOptions(WithoutDropout):
    """Options of `train.tpo`."""

    learning_rate: float = Field(default=5e-7, gt=0, description="peak learning rate")
    loss: Annotated[Choice, Uses(Group.LOSS, having=(("family", Family.THREE_WAY),))] = Field(
        default=Choice(name="tpo"), description="a loss over pairs beside a gold answer"
    )


class Tpo(OfflineTrainer):
    """Train on preference pairs and a gold answer to the same prompt (Saeidi et al. 2024, arXiv 2405.16681).

    The gold answer is learned by its likelihood; there is no reference policy. Dropout is off.
    """

    config = TpoOptions
    family = Family.THREE_WAY
    formats = frozenset({"three_way"})
    dropout = False
    sequences = 3

    def passages(
        self, row: Mapping[str, Any], format: Format, needs: frozenset[Need]
    ) -> Sequence[Passage] | str:
        """The three answers to one prompt, unless they contradict each other. The gold one may be the chosen one."""
        if row["chosen"] == row["rejected"]:
            return "chosen and rejected are the same"
        if row["gold"] == row["rejected"]:
            return "gold and rejected are the same"
        return format.passages(row)

    def batch(self, scores: Scores, config: Any) -> ThreeWayBatch:
        """Sum the log-probs of each answer."""
        chosen, rejected, gold = scores.totals(scores.logp).unbind(1)
        counts = scores.lengths.to(chosen).view(-1, 3).unbind(1)
        return ThreeWayBatch(
            chosen=chosen,
            rejected=rejected,
            gold=gold,
            chosen_tokens=counts[0],
            rejected_tokens=counts[1],
            gold_tokens=counts[2],
            weight=scores.weight,
        )
