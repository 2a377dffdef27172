from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.evaluation import Context, answers, likelihoods, model, report

from posttrain.artifacts.kinds import Kind, PolicyFacts, ReportFacts
from posttrain.contracts.stage import Certainty, Input, Level, Outcome, Verdict
from posttrain.errors import StageError
from posttrain_plugins.evaluation.gate import Gate, GateConfig, run
from posttrain_plugins.evaluation.report import Item, Metric

SFT, DPO, OTHER = model("sft"), model("dpo"), model("other")


def right(count: int, of: int, first: int = 0) -> list[bool]:
    """`count` right answers of `of`, from item `first` on."""
    return [first <= i < first + count for i in range(of)]


def judge(
    directory: Path,
    items: Sequence[Item],
    candidates: Sequence[Any] = (DPO,),
    baseline: Any = SFT,
    **options: Any,
) -> tuple[Outcome, Context]:
    config = GateConfig(**options)
    inputs = {"report": [report(directory / "report", items, config.metric)], "candidate": list(candidates)}
    context = Context(directory, config, inputs | ({"baseline": [baseline]} if baseline else {}))
    return run(context), context


def test_a_clear_improvement_passes(tmp_path: Path) -> None:
    items = [*answers(SFT, right(40, 100)), *answers(DPO, right(70, 100))]
    outcome, context = judge(tmp_path, items)
    assert outcome.verdict == Verdict.COMPLETED
    # 30 wins, 0 losses: (31 − 1) / 102 ± 1.95996 · sqrt((32/102 − (30/102)²) / 102)
    assert outcome.figures["improvement"] == pytest.approx(0.3)
    assert outcome.figures["improvement.low"] == pytest.approx(0.20168, abs=1e-4)
    assert outcome.figures["improvement.high"] == pytest.approx(0.38656, abs=1e-4)
    assert outcome.summary == (f"{SFT.ref} 0.400 → {DPO.ref} 0.700: +0.300 [0.202, 0.387], n=100: pass")
    kind, facts = context.described["verdict"]
    assert (kind, facts.report, facts.verdict) == (Kind.REPORT, "verdict", "pass")
    assert facts.subjects == (DPO.digest, SFT.digest)
    record = json.loads((context.output("verdict") / "verdict.json").read_text())
    assert record["candidates"][DPO.digest]["mcnemar"] == {"wins": 30, "losses": 0, "p_value": 2 / 2**30}


@pytest.mark.parametrize(
    ("before", "after", "options", "verdict"),
    [
        (40, 42, {}, Verdict.INCONCLUSIVE),
        (70, 40, {}, Verdict.REJECTED),
        (40, 70, {"min_improvement": 0.25}, Verdict.INCONCLUSIVE),
        (40, 70, {"min_improvement": 0.45}, Verdict.REJECTED),
        (40, 40, {"min_improvement": -0.1}, Verdict.COMPLETED),
        (40, 70, {"threshold": 0.5}, Verdict.COMPLETED),
        (40, 70, {"threshold": 0.7}, Verdict.INCONCLUSIVE),
        (40, 70, {"threshold": 0.9}, Verdict.REJECTED),
        (40, 52, {"confidence": 0.9999}, Verdict.INCONCLUSIVE),
        (40, 52, {"confidence": 0.99}, Verdict.COMPLETED),
    ],
)
def test_the_interval_decides(
    tmp_path: Path, before: int, after: int, options: dict[str, Any], verdict: Verdict
) -> None:
    items = [*answers(SFT, right(before, 100)), *answers(DPO, right(after, 100))]
    assert judge(tmp_path, items, **options)[0].verdict == verdict


def test_a_doubt_says_what_would_decide_it(tmp_path: Path) -> None:
    items = [*answers(SFT, right(40, 100)), *answers(DPO, right(42, 100))]
    outcome, _ = judge(tmp_path, items)
    assert outcome.verdict == Verdict.INCONCLUSIVE
    # Two wins of 100: (2 + 1)/102 − 1/102 = 0.0196, ± 1.96 · sqrt((4/102 − 0.0196²)/102) = 0.0382. It reaches
    # 0.02 + 0.0186 below the estimate, 1.93 times as far as 0 is: 1.93² · 100 = 374 rows, in two digits.
    open_ = "the improvement 0.020 [-0.019, 0.058] does not settle on a side of the 0 that it must exceed"
    assert f"; {open_}; about 380 rows instead of 100 would, if it stays as it is" in outcome.summary
    more = [*answers(SFT, right(40, 100) * 4), *answers(DPO, right(42, 100) * 4)]
    assert judge(tmp_path / "more", more)[0].verdict == Verdict.COMPLETED


@pytest.mark.parametrize(
    ("before", "after", "options", "expected"),
    [
        (40, 70, {"threshold": 0.7}, "the threshold 0.7; 100 rows say nothing of which side it is on"),
        (40, 70, {"threshold": 0.65}, "the threshold 0.65; about 370 rows instead of 100 would"),
        (40, 40, {"threshold": None}, "of the 0 that it must exceed; 100 rows say nothing"),
        (40, 70, {"min_improvement": 0.25}, "of the 0.25 that it must exceed; about 390 rows"),
    ],
)
def test_how_many_rows_a_decision_takes(
    tmp_path: Path, before: int, after: int, options: dict[str, Any], expected: str
) -> None:
    items = [*answers(SFT, right(before, 100)), *answers(DPO, right(after, 100))]
    assert expected in judge(tmp_path, items, **options)[0].summary


def test_on_few_items_the_exact_test_must_agree(tmp_path: Path) -> None:
    # Five wins of five: the interval is all above 0, but McNemar's exact p-value is 2/32 = 0.0625.
    five = [*answers(SFT, right(0, 5), prediction="x"), *answers(DPO, right(5, 5))]
    outcome, _ = judge(tmp_path, five)
    assert outcome.figures["improvement.low"] > 0
    assert outcome.verdict == Verdict.INCONCLUSIVE
    assert "the exact test finds p = 0.0625, and 0.05 at most would pass; about 6 rows" in outcome.summary
    six = [*answers(SFT, right(0, 6), prediction="x"), *answers(DPO, right(6, 6))]
    assert judge(tmp_path / "six", six)[0].verdict == Verdict.COMPLETED


def test_items_are_paired_by_row_not_by_place(tmp_path: Path) -> None:
    items = [*answers(SFT, right(10, 40)), *reversed(answers(DPO, right(10, 40)))]
    _, context = judge(tmp_path, items)
    record = json.loads((context.output("verdict") / "verdict.json").read_text())
    assert record["candidates"][DPO.digest]["mcnemar"]["wins"] == 0


def test_of_several_candidates_all_must_pass_and_the_best_is_named(tmp_path: Path) -> None:
    base = answers(SFT, right(40, 100))
    both = [*base, *answers(DPO, right(70, 100)), *answers(OTHER, right(80, 100))]
    outcome, context = judge(tmp_path, both, [DPO, OTHER])
    assert outcome.verdict == Verdict.COMPLETED
    assert context.described["verdict"][1].subjects == (OTHER.digest, SFT.digest)
    one = [*base, *answers(DPO, right(70, 100)), *answers(OTHER, right(42, 100))]
    outcome, context = judge(tmp_path / "one", one, [DPO, OTHER])
    assert outcome.verdict == Verdict.INCONCLUSIVE
    assert outcome.summary.startswith("inconclusive; ")
    none = [*base, *answers(DPO, right(70, 100)), *answers(OTHER, right(5, 100))]
    assert judge(tmp_path / "none", none, [DPO, OTHER])[0].verdict == Verdict.REJECTED


def test_a_threshold_alone(tmp_path: Path) -> None:
    outcome, context = judge(tmp_path, answers(DPO, right(90, 100)), baseline=None, threshold=0.8)
    assert outcome.verdict == Verdict.COMPLETED
    assert outcome.summary == f"{DPO.ref} 0.900 [0.826, 0.945], n=100: pass"
    assert context.described["verdict"][1].subjects == (DPO.digest,)


def test_lower_perplexity_is_better(tmp_path: Path) -> None:
    items = [
        *likelihoods(SFT, [2.0, 4.0, 3.1, 5.2], [2, 4, 3, 5]),
        *likelihoods(DPO, [1.0, 2.1, 1.5, 2.6], [2, 4, 3, 5]),
    ]
    outcome, _ = judge(tmp_path, items, metric="perplexity")
    assert outcome.verdict == Verdict.COMPLETED
    assert outcome.figures["improvement"] == pytest.approx((14.3 - 7.2) / 14)
    assert judge(tmp_path / "b", items, [SFT], DPO, metric="perplexity")[0].verdict == Verdict.REJECTED
    floor = judge(tmp_path / "c", items, baseline=None, metric="perplexity", threshold=2.5)
    assert floor[0].verdict == Verdict.COMPLETED


def test_perplexities_of_different_tokens_do_not_compare(tmp_path: Path) -> None:
    items = [*likelihoods(SFT, [2.0, 4.0], [2, 4]), *likelihoods(DPO, [2.0, 4.0], [3, 4])]
    with pytest.raises(StageError, match="different tokens"):
        judge(tmp_path, items, metric="perplexity")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [({"prediction": ""}, "every answer is empty"), ({"finished": False}, "every answer was cut off")],
)
def test_an_exact_zero_from_broken_generation_is_no_result(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    items = [*answers(SFT, right(5, 9)), *answers(DPO, right(0, 9), **changes)]
    with pytest.raises(StageError, match=problem):
        judge(tmp_path, items)
    assert judge(tmp_path / "tiny", items, check_answers=False)[0].verdict != Verdict.COMPLETED
    mixed = [*items[:-1], items[-1].model_copy(update={"prediction": "b", "finished": True})]
    assert judge(tmp_path / "mixed", mixed)[0].verdict != Verdict.COMPLETED


def test_answers_that_are_partly_empty_and_partly_cut_off_are_no_result_either(tmp_path: Path) -> None:
    nothing = [
        item.model_copy(update={"prediction": ""} if i % 2 else {"finished": False})
        for i, item in enumerate(answers(DPO, right(0, 9)))
    ]
    with pytest.raises(StageError, match="every answer is empty or was cut off") as caught:
        judge(tmp_path, [*answers(SFT, right(5, 9)), *nothing])
    assert caught.value.found == "of 9 answers 4 empty, 5 cut off"


def test_a_baseline_that_never_stops_is_noted_and_judged_against(tmp_path: Path) -> None:
    items = [*answers(SFT, right(0, 40), finished=False), *answers(DPO, right(30, 40))]
    outcome, context = judge(tmp_path, items)
    assert outcome.verdict == Verdict.COMPLETED
    ((level, message),) = context.said
    assert level == Level.WARNING and "every answer was cut off" in message and SFT.ref in message
    assert judge(tmp_path / "b", items, check_answers=False)[1].said == []


def test_models_that_the_report_lacks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="no items of this model"):
        judge(tmp_path, answers(SFT, right(5, 9)))


def test_different_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="same rows") as caught:
        judge(tmp_path, [*answers(SFT, right(5, 9)), *answers(DPO, right(5, 8))])
    assert caught.value.found == "8 and 9 rows, 8 in common"


def test_a_metric_that_was_not_measured_is_refused(tmp_path: Path) -> None:
    items = [*answers(SFT, right(5, 9)), *answers(DPO, right(5, 9))]
    inputs = {
        "report": [report(tmp_path / "report", items, Metric.EXACT_MATCH)],
        "candidate": [DPO],
        "baseline": [SFT],
    }
    with pytest.raises(StageError, match="no item with perplexity"):
        run(Context(tmp_path, GateConfig(metric="perplexity"), inputs))


def test_plan_refuses_gates_that_decide_nothing_or_judge_strangers() -> None:
    check = Gate().check
    known = {
        "report": [
            Input("eval.report", Kind.REPORT, ReportFacts(report="evaluation", subjects=(SFT.digest,)))
        ],
        "candidate": [Input("dpo.model", Kind.MODEL, DPO.facts, DPO)],
        "baseline": [Input("sft.model", Kind.MODEL, SFT.facts, SFT)],
    }
    (absent,) = check(GateConfig(), known)
    assert (absent.level, absent.certainty, absent.port) == (Level.ERROR, Certainty.VERIFIED, "candidate")
    unknown = {
        "report": [Input("eval.report", Kind.REPORT, ReportFacts())],
        "candidate": [Input("dpo.model", Kind.MODEL, PolicyFacts())],
    }
    (nothing,) = check(GateConfig(), unknown)
    assert "would decide nothing" in nothing.message
    assert list(check(GateConfig(threshold=0.5), unknown)) == []
    verdict = [Input("gate.verdict", Kind.REPORT, ReportFacts(report="verdict"))]
    (wrong,) = check(GateConfig(threshold=0.5), {**unknown, "report": verdict})
    assert "not an evaluation" in wrong.message
