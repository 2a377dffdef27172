"""What a step is made of: reductions, terms, measures, state, errors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from helpers.fixed_values import Values, two_rows
from helpers.losses import REDUCTIONS, Baseline
from helpers.step_cases import EVERY_LAYOUT, EVERY_TRAINING
from helpers.stepping import (
    assert_same,
    examples,
    gradient,
    on_threads,
    stepper,
)

from posttrain.contracts.loss import LossOutput, PreferenceBatch, Term, TokenBatch
from posttrain.contracts.reduction import (
    EXAMPLE_MEAN,
    MEAN_OF_SEQUENCE_MEANS,
    SEQUENCE_MEAN,
    TOKEN_MEAN,
    Constant,
    Reduction,
    RoleTokenMean,
)
from posttrain.contracts.trainer import Scores
from posttrain.errors import StageError
from posttrain_plugins.losses.preference.sigmoid import Sigmoid


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=str)
def test_the_reduction_is_taken_over_the_whole_step(reduction: Reduction):
    """Against one sequence at a time through plain logits, reduced once at the end."""
    rows = examples("train.sft")
    made = stepper("train.sft", f"reduced-{reduction}", 60)
    loss, _, found = gradient(made, rows)
    made.model.zero_grad()
    sums, means, tokens = [], [], 0
    for row in rows:
        (each,) = row.sequences
        logp = made.model(torch.tensor([each.tokens])).logits[0].log_softmax(-1)
        kept = [i for i in range(1, len(each.tokens)) if each.supervised[i]]
        sums.append(-row.weight * sum(logp[i - 1, each.tokens[i]] for i in kept))
        means.append(sums[-1] / len(kept))
        tokens += len(kept)
    expected = {
        TOKEN_MEAN: sum(sums) / tokens,
        SEQUENCE_MEAN: sum(sums) / len(rows),
        EXAMPLE_MEAN: sum(sums) / len(rows),
        MEAN_OF_SEQUENCE_MEANS: sum(means) / len(rows),
    }.get(reduction, sum(sums) / 50)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert_same(found, [p.grad for p in made.model.parameters()])


@pytest.mark.parametrize(
    ("reduction", "weight", "expected"),
    [
        (TOKEN_MEAN, 1.0, 10 / 3),
        (TOKEN_MEAN, 0.5, 5 / 3),
        (SEQUENCE_MEAN, 1.0, 5.0),
        (EXAMPLE_MEAN, 1.0, 5.0),
        (MEAN_OF_SEQUENCE_MEANS, 1.0, 4.0),
        (Constant(20), 1.0, 0.5),
    ],
    ids=str,
)
def test_reductions_worked_out_by_hand(reduction: Reduction, weight: float, expected: float):
    made = stepper("train.sft", "values", plugin=Values(reduction, weight))
    assert made.backward(two_rows()).loss == pytest.approx(expected)


def test_terms_add_up():
    class Two(Values):
        def __call__(self, batch: TokenBatch, config: Any, stats: Any, state: Any) -> LossOutput:
            first = super().__call__(batch, config, stats, state).terms[0]
            return LossOutput([first, Term(first.values, TOKEN_MEAN, 0.1)])

    made = stepper("train.sft", "two", plugin=Two(TOKEN_MEAN))
    assert made.backward(two_rows()).loss == pytest.approx(11 / 3)


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        (lambda logp: [], "no terms"),
        (lambda logp: [Term(logp.detach(), TOKEN_MEAN)], "no gradient"),
        (lambda logp: [Term(logp.sum(), TOKEN_MEAN)], "do not fit its reduction"),
        (lambda logp: [Term(logp[None], TOKEN_MEAN)], "do not fit its reduction"),
        (lambda logp: [Term(logp[:1], MEAN_OF_SEQUENCE_MEANS)], "do not fit its reduction"),
        (lambda logp: [Term(logp[:1], SEQUENCE_MEAN)], "3 tokens or 2 sequences, for sequence_mean"),
    ],
)
def test_a_wrong_loss_is_named(terms: Any, message: str):
    class Wrong(Values):
        def __call__(self, batch: TokenBatch, config: Any, stats: Any, state: Any) -> LossOutput:
            return LossOutput(terms(batch.logp))

    with pytest.raises(StageError) as caught:
        stepper("train.sft", "wrong", plugin=Wrong(TOKEN_MEAN)).backward(two_rows())
    assert message in str(caught.value)
    assert "loss `wrong`" in caught.value.where


def test_a_reduction_over_a_role_that_is_not_there_is_named():
    made = stepper("train.sft", "wrong", plugin=Values(RoleTokenMean("chosne")))
    with pytest.raises(StageError, match="a role that no sequence has") as caught:
        made.backward(two_rows())
    assert (caught.value.found, caught.value.expected) == ("chosne", "one of completion")


def test_metrics_leave_out_what_is_not_finite():
    class Odd(Values):
        def __call__(self, batch: TokenBatch, config: Any, stats: Any, state: Any) -> LossOutput:
            output = super().__call__(batch, config, stats, state)
            return LossOutput(
                output.terms, {"a": torch.tensor([0.2, math.nan, 0.6]), "b": torch.tensor([math.inf])}
            )

    found = stepper("train.sft", "odd", plugin=Odd(TOKEN_MEAN)).backward(two_rows()).metrics
    assert found == {"a": pytest.approx(0.4)}


def test_a_pair_stays_in_one_micro_batch_and_finds_its_own_reference():
    seen: list[PreferenceBatch] = []

    class Spy(Sigmoid):
        def __call__(self, batch: PreferenceBatch, config: Any, stats: Any, state: Any) -> LossOutput:
            seen.append(batch)
            return super().__call__(batch, config, stats, state)

    made = stepper("train.dpo", "spy", 1, plugin=Spy())
    made.backward(examples("train.dpo", 3))
    assert [len(batch.chosen) for batch in seen] == [1, 1, 1]
    references = sorted((-float(batch.reference_chosen), -float(batch.reference_rejected)) for batch in seen)
    assert references == [(9.0, 18.0), (10.0, 20.0), (11.0, 22.0)]


@EVERY_LAYOUT
def test_the_gap_to_the_reference_is_the_largest_by_token(layout: str):
    made = stepper("train.dpo", "sigmoid", layout=layout)
    rows = examples("train.dpo", 2)
    made.reference = made.totals(rows, lambda done: None)
    assert made.backward(rows).gap < 1e-6
    made.reference[1] = made.reference[1] + torch.tensor([0.0, 3.0])
    tokens = rows[1].sequences[1].predicted
    assert made.backward(rows).gap == pytest.approx(3.0 / tokens, rel=1e-4)


def test_totals_group_sequences_by_example():
    rows = examples("train.dpo", 2)
    scores = Scores(
        examples=rows,
        logp=torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0]),
        entropy=torch.zeros(5),
        top1=torch.zeros(5, dtype=torch.bool),
        sequence=torch.tensor([0, 0, 1, 2, 3]),
        lengths=torch.tensor([2, 1, 1, 1]),
        weight=torch.ones(2),
    )
    assert scores.totals(scores.logp).tolist() == [[3.0, 4.0], [8.0, 16.0]]


def test_sums_over_the_step_are_known_before_the_loss_is_called():
    seen: list[tuple[float, int]] = []

    class Spy(Baseline):
        def __call__(self, batch: PreferenceBatch, config: Any, stats: Any, state: Any) -> LossOutput:
            seen.append((float(stats["rewards"]), int(stats["sides"])))
            return super().__call__(batch, config, stats, state)

    made = stepper("train.dpo", "spy", 1, plugin=Spy())
    rows = examples("train.dpo", 3)
    policy = made.totals(rows, lambda done: None)
    made.backward(rows)
    rewards = sum(float((policy[row.row] - made.reference[row.row]).sum()) for row in rows)
    assert seen == [(pytest.approx(rewards, rel=1e-5), 6)] * 3


def flat(state: Any, path: str = "") -> dict[str, float]:
    """The numbers of a state, whose parts may have states of their own, by path."""
    if not isinstance(state, Mapping):
        return {path: state}
    return {name: value for key in state for name, value in flat(state[key], f"{path}/{key}").items()}


@EVERY_TRAINING
@pytest.mark.parametrize("count", [1, 4])
def test_ranks_share_a_step_even_where_one_has_no_example(uses: str, loss: str, count: int):
    """Their mean gradient, loss, metrics and state are those of one process."""
    rows, alone = examples(uses, count), stepper(uses, loss)
    whole, metrics, expected = gradient(alone, rows)
    steppers = [stepper(uses, loss, 60) for _ in range(3)]

    def work(rank: Any) -> Any:
        made = steppers[rank.rank]
        made.parallel = rank
        return gradient(made, rows)

    found = on_threads(3, work)
    for share, told, _ in found:
        assert share == pytest.approx(whole, rel=1e-6)
        assert told == pytest.approx(metrics, rel=1e-4, abs=1e-5)
    for made in steppers:
        assert flat(made.state) == pytest.approx(flat(alone.state), rel=1e-5)
    assert_same([sum(each) / 3 for each in zip(*(grads for *_, grads in found), strict=True)], expected)


def test_what_is_measured_has_one_shape_on_all_ranks():
    class Ragged(Baseline):
        def measure(self, batch: PreferenceBatch, config: Any, state: Any) -> Any:
            return {"rewards": batch.chosen}

    rows, steppers = examples("train.dpo", 3), [stepper("train.dpo", "x", plugin=Ragged()) for _ in range(2)]

    def work(rank: Any) -> Any:
        steppers[rank.rank].parallel = rank
        return steppers[rank.rank].backward(rows)

    with pytest.raises(StageError, match="the same shape in every part"):
        on_threads(2, work)


def test_losses_of_both_signs_that_are_infinite_are_no_number():
    class Infinite(Values):
        def __call__(self, batch: TokenBatch, config: Any, stats: Any, state: Any) -> LossOutput:
            sign = 1 if batch.weight[0] == 2.0 else -1
            return LossOutput([Term(batch.logp * 0 + sign * math.inf, TOKEN_MEAN)])

    steppers = [stepper("train.sft", "infinite", 1, plugin=Infinite(TOKEN_MEAN)) for _ in range(2)]

    def work(rank: Any) -> Any:
        steppers[rank.rank].parallel = rank
        return steppers[rank.rank].backward(two_rows())

    for found in on_threads(2, work):
        assert math.isnan(found.loss) and found.suspects == [0, 1]


def test_the_state_advances_once_a_step_with_the_sums_of_that_step():
    made = stepper("train.dpo", "running-mean", 1)
    rows = examples("train.dpo", 3)
    assert made.state == {"mean": 0.0, "steps": 0}
    made.backward(rows)
    first = made.state
    made.backward(rows)
    assert (first["steps"], made.state["steps"]) == (1, 2)
    assert made.state["mean"] == pytest.approx(first["mean"], rel=1e-5)


@pytest.mark.parametrize("loss", ["surprising", "centred"])
def test_a_second_pass_draws_the_same_dropout_masks(loss: str):
    """With other masks the scores of the passes differ, and so would what is measured and what is learned."""
    rows = examples("train.sft")
    made = stepper("train.sft", loss, 60, attention_dropout=0.3)
    drawn: list[list[float]] = []
    forward = made.score

    def spy(micro: Any) -> Scores:
        scores = forward(micro)
        drawn.append(scores.logp.tolist())
        return scores

    made.score = spy
    torch.manual_seed(3)
    made.backward(rows)
    after = torch.rand(1)
    half = len(drawn) // 2
    assert half > 1 and drawn[:half] == drawn[half:]
    assert drawn[0] != stepper("train.sft", loss, 60).score(next(made.micro_batches(rows))).logp.tolist()
    made.score = forward
    torch.manual_seed(3)
    made.backward(rows)
    assert torch.rand(1) == after


@EVERY_LAYOUT
def test_only_supervised_positions_reach_the_head(layout: str):
    made = stepper("train.sft", "nll", layout=layout)
    seen: list[int] = []
    made.model.lm_head.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    rows = examples("train.sft")
    made.backward(rows)
    assert sum(seen) == sum(row.predicted for row in rows)
