"""What trainers take as their loss, and what is told where it does not fit, is there twice or lacks a metric."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.contexts import catalogue, configured
from helpers.training import fitting_losses

from posttrain.artifacts.kinds import DatasetFacts, Kind, PolicyFacts, ScoreFacts
from posttrain.contracts.component import Component, NoOptions
from posttrain.contracts.loss import Family, Loss, Scope
from posttrain.contracts.registration import Group
from posttrain.contracts.stage import Finding, Input
from posttrain.registry.components import ConfigProblems
from posttrain_plugins.losses.preference.referenced import ReferencedLoss
from posttrain_plugins.training.objective import mixed
from posttrain_plugins.training.valued import told

TRAINERS = catalogue().names(Group.TRAINER)
FITTING = {uses: fitting_losses(uses) for uses in TRAINERS}


def misfits() -> Iterator[tuple[str, str]]:
    for uses in TRAINERS:
        yield from ((uses, loss) for loss in catalogue().names(Group.LOSS) if loss not in FITTING[uses])


@pytest.mark.parametrize(("uses", "loss"), list(misfits()))
def test_a_loss_that_does_not_fit_is_refused_with_what_does(uses: str, loss: str) -> None:
    with pytest.raises(ConfigProblems) as caught:
        configured(catalogue().stage(uses), loss=loss)
    (problem,) = caught.value.problems
    assert problem.message == f"the loss `{loss}` does not fit here"
    assert str(problem.expected) == f"one of {', '.join(FITTING[uses])}"
    for other in TRAINERS:
        assert (f"`{other}`" in str(problem.suggestion)) == (loss in FITTING[other])
    assert "_" not in str(problem.found).replace("process_reward", "").replace("three_way", "")


def findings(uses: str, **options: Any) -> list[Finding]:
    stage = catalogue().stage(uses)
    data = Input("d", Kind.DATASET, DatasetFacts(format=min(stage.formats), rows=9))  # type: ignore[attr-defined]
    given = {"model": (Input("m", Kind.MODEL, PolicyFacts()),), "data": (data,), "eval": (data,)}
    return [each for each in stage.check(configured(stage, **options), given) if each.rule == "trainer"]


@pytest.mark.parametrize(
    ("loss", "named"),
    [
        (["sigmoid", "sigmoid"], True),
        (["sigmoid", "hinge", {"name": "sigmoid", "beta": 0.1}], True),
        (["sigmoid", {"name": "sigmoid", "beta": 0.2}], False),
        (["sigmoid", "sft"], False),
        ("sigmoid", False),
    ],
)
def test_a_loss_stands_once_in_a_list(loss: Any, named: bool) -> None:
    found = [each.message for each in findings("train.dpo", loss=loss)]
    assert found == (["the loss `sigmoid` stands twice in `loss`, with the same options"] if named else [])


SELECTED = {"load_best_model_at_end": True, "eval_steps": 1, "greater_is_better": True}


@pytest.mark.parametrize("uses", TRAINERS)
def test_a_metric_to_judge_by_is_one_that_is_told(uses: str) -> None:
    for loss in FITTING[uses]:
        told = catalogue().load(Group.LOSS, loss).metrics
        assert told
        for name in ("loss", sorted(told)[0]):
            assert findings(uses, loss=loss, **SELECTED, metric_for_best_model=f"eval/{name}") == []
    (finding,) = findings(uses, **SELECTED, metric_for_best_model="eval/los")
    assert "eval/los`, which no evaluation has" in finding.message
    assert "did you mean `eval/loss`?" in str(finding.fix)


@pytest.mark.parametrize("uses", TRAINERS)
def test_the_name_of_a_metric_is_judged_before_its_direction(uses: str) -> None:
    told = sorted(catalogue().load(Group.LOSS, FITTING[uses][0]).metrics - {"loss"})[0]
    open_ = {**SELECTED, "greater_is_better": None, "loss": FITTING[uses][0]}
    (misspelt,) = findings(uses, **open_, metric_for_best_model="eval/los")
    assert "which no evaluation has" in misspelt.message
    (undirected,) = findings(uses, **open_, metric_for_best_model=f"eval/{told}")
    assert "greater_is_better: true" in str(undirected.fix)


def test_metrics_of_several_losses_have_their_names() -> None:
    parts = [
        Component(name, catalogue().load(Group.LOSS, name)(), NoOptions()) for name in ("sigmoid", "sft")
    ]
    told = mixed(parts, None).plugin.metrics
    assert {"rewards/margin", "logps/chosen", "sft/logps/chosen"} <= told
    assert "sft/rewards/margin" not in told
    options = {"loss": ["sigmoid", "sft"], **SELECTED}
    assert findings("train.dpo", **options, metric_for_best_model="eval/sft/logps/chosen") == []
    assert findings("train.dpo", **options, metric_for_best_model="eval/sft/rewards/margin")


def test_a_loss_with_a_call_of_its_own_has_metrics_of_its_own() -> None:
    class Other(ReferencedLoss):
        def values(self, batch: Any, config: Any, state: Any) -> Any: ...

    class Called(Other):
        def __call__(self, batch: Any, config: Any, stats: Any, state: Any) -> Any: ...

    assert Other.metrics == ReferencedLoss.metrics
    assert Called.metrics is None is Loss.metrics


def test_metrics_are_inherited_as_long_as_nothing_that_tells_them_is_overridden() -> None:
    class Base(Loss):
        family = Family.PREFERENCE
        metrics = frozenset({"base"})

        def __call__(self, batch: Any, config: Any, stats: Any, state: Any) -> Any: ...

        def extra(self) -> dict[str, Any]: ...

        @abstractmethod
        def values(self) -> Any: ...

    class Added:
        def extra(self) -> dict[str, Any]: ...

    class Filled(Base):
        scope = Scope.STEP

        def values(self) -> Any: ...

        def measure(self, batch: Any, config: Any, state: Any) -> Any: ...

        def helper(self) -> Any: ...

    class Overridden(Filled):
        def extra(self) -> dict[str, Any]: ...

    class Below(Overridden): ...

    class Mixed(Added, Filled): ...

    class Anew(Overridden):
        metrics = frozenset({"base", "more"})

    assert Filled.metrics == {"base"}
    assert Overridden.metrics is Below.metrics is Mixed.metrics is None
    assert Anew.metrics == {"base", "more"}


@pytest.mark.parametrize(
    ("uses", "expected"),
    [("train.reward", "rewards 0.5 ± 0.25"), ("train.prm", "log-odds of a right step 0.5 ± 0.25")],
)
def test_what_a_model_comes_to_says_what_its_numbers_are(uses: str, expected: str) -> None:
    scores = ScoreFacts(mean=0.5, deviation=0.25, count=8)
    trainer: Any = catalogue().stage(uses)
    assert told(scores, trainer.numbers) == expected
    judged = scores.model_copy(update={"accuracy": 0.75, "judged": 4, "held_out": True})
    assert told(judged, trainer.numbers) == f"accuracy 0.750 over 4 judgements of held-out rows; {expected}"
