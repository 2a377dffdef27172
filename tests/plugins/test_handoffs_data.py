"""Rules about rows, pairs and reports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from helpers.sites import data, findings, policy, report, site, summary

from posttrain.artifacts.kinds import TemplateFingerprint, TokenFacts
from posttrain.contracts.rule import Rule, Site
from posttrain_plugins.handoffs.datasets import (
    AnswersFirst,
    DatasetSmall,
    RowsLong,
    RowsRepeated,
    TokensLong,
    TokensStale,
    TrainedTwice,
)
from posttrain_plugins.handoffs.evaluations import (
    HeldOutLeakage,
    JudgedOther,
    Leakage,
    ReportExtreme,
    ReportsOfDifferentData,
    ReportUnanswered,
    SameCompared,
)
from posttrain_plugins.handoffs.preferences import (
    OffPolicy,
    PairsContradict,
    PairsIdentical,
    PairsInverted,
    SideConstant,
)
from posttrain_plugins.trainers.sft import Sft

ERROR, WARNING = ("error", "predicted"), ("warning", "predicted")
UNKNOWN = ("note", "unknown")


def trained(**facts: Any) -> Site:
    return site("train", model=policy(), data=data(**facts))


@pytest.mark.parametrize(
    ("rule", "flaw", "count", "expected"),
    [
        (PairsInverted, "inverted_pairs", 1, WARNING),
        (PairsInverted, "inverted_pairs", 50, ERROR),
        (PairsInverted, "inverted_pairs", 49, WARNING),
        (PairsIdentical, "identical_pairs", 99, WARNING),
        (PairsIdentical, "identical_pairs", 100, ERROR),
        (PairsContradict, "contradicting_pairs", 1, WARNING),
        (SideConstant, "constant_sides", 95, WARNING),
        (RowsRepeated, "repeated_rows", 51, WARNING),
        (AnswersFirst, "answers_first", 51, WARNING),
    ],
)
def test_flaws(rule: type[Rule], flaw: str, count: int, expected: tuple[str, str]) -> None:
    facts = {"rows": 100, "flaws": {flaw: count}}
    assert summary(rule, trained(**facts)) == [expected]
    (found,) = findings(rule, trained(**facts))
    assert f"{count} of 100" in found.message and found.port == "data"
    assert summary(rule, trained(rows=100, flaws={})) == summary(rule, trained(rows=100)) == []
    held_out = site("train", model=policy(), data=data(), eval=data("held.data", **facts))
    assert summary(rule, held_out) == [], "only what is learned from is judged"


def test_the_fix_of_inverted_pairs_swaps_the_scores_that_are_there() -> None:
    columns = ("chosen", "prompt", "rejected", "chosen_reward", "rejected_reward")
    (found,) = findings(PairsInverted, trained(rows=2, flaws={"inverted_pairs": 2}, columns=columns))
    swap = (
        "{chosen: rejected, rejected: chosen, chosen_reward: rejected_reward, rejected_reward: chosen_reward}"
    )
    assert f"`columns: {swap}`" in str(found.fix)
    assert "score_chosen: score_rejected, score_rejected: score_chosen" in PairsInverted.fix


@pytest.mark.parametrize(("rule", "flaw"), [(RowsRepeated, "repeated_rows"), (AnswersFirst, "answers_first")])
def test_some_rows_of_a_kind_are_no_flaw(rule: type[Rule], flaw: str) -> None:
    assert summary(rule, trained(rows=100, flaws={flaw: 50})) == []


@pytest.mark.parametrize(
    ("rule", "flaw"),
    [
        (PairsInverted, "inverted_pairs"),
        (PairsIdentical, "identical_pairs"),
        (PairsContradict, "contradicting_pairs"),
    ],
)
def test_a_few_odd_pairs_among_many_are_noted(rule: type[Rule], flaw: str) -> None:
    assert summary(rule, trained(rows=1000, flaws={flaw: 9})) == [("note", "predicted")]
    assert summary(rule, trained(rows=1000, flaws={flaw: 10})) == [WARNING]


def test_rows_and_a_step() -> None:
    def check(rows: int | None, batch: int | None) -> list[tuple[str, str]]:
        config = SimpleNamespace() if batch is None else SimpleNamespace(batch_size=batch)
        return summary(DatasetSmall, site("train", config=config, model=policy(), data=data(rows=rows)))

    assert check(7, 8) == [WARNING]
    assert check(8, 8) == check(None, 8) == check(7, None) == []


def test_the_same_data_twice() -> None:
    def check(first: str, second: str, uses: str = "train") -> list[tuple[str, str]]:
        sft = site(uses, node="sft", model=policy("base.model"), data=data(first))
        return summary(TrainedTwice, site("train", sft, model=policy("sft.model"), data=data(second)))

    assert check("chats.data", "chats.data") == [WARNING]
    assert check("chats.data", "more.data") == []
    assert check("chats.data", "chats.data", "train-tokens") == [], "learned in another way"


@pytest.mark.parametrize(
    ("longest", "vocabulary", "limit", "context", "expected"),
    [
        (65, 90, 64, None, [WARNING]),
        (64, 90, 64, None, []),
        (65, 90, None, 64, [WARNING]),
        (65, 32000, 64, None, []),
        (8 * 65, 32000, 64, 2048, [WARNING]),
        (None, 90, 64, None, []),
        (65, None, 64, None, []),
        (65, 90, None, None, []),
    ],
)
def test_rows_that_are_surely_too_long(
    longest: int | None, vocabulary: int | None, limit: int | None, context: int | None, expected: Any
) -> None:
    model = policy(vocabulary=vocabulary, context=context)
    at = site("train", config=SimpleNamespace(max_length=limit), model=model, data=data(longest=longest))
    assert summary(RowsLong, at) == expected


def test_who_says_what_becomes_of_long_rows_is_not_warned() -> None:
    facts = {"model": policy(vocabulary=90), "data": data(longest=65)}
    for given, expected in (({}, [WARNING]), ({"truncation": "drop"}, [])):
        config = Sft.config.model_validate({"max_length": 64, **given})
        assert summary(RowsLong, site("train", config=config, **facts)) == expected


def test_tokens_of_another_tokenizer_or_template() -> None:
    def check(tokenizer: str | None = "a", template: str | None = "t") -> list[str]:
        own = TemplateFingerprint(tokens="t" * 64, text="x")
        model = policy(tokenizer="a" * 64, template=own)
        made = TokenFacts(tokenizer=tokenizer and tokenizer * 64, template=template and template * 64)
        return [
            each.message for each in findings(TokensStale, site("train", model=model, data=data(tokens=made)))
        ]

    assert check() == check(None, None) == []
    (other,) = check(tokenizer="b")
    assert "another tokenizer (bbbbbbbbbbbb) than that of sft.model (aaaaaaaaaaaa)" in other
    (stale,) = check(template="s")
    assert "another chat template" in stale
    assert summary(TokensStale, trained()) == []


def test_tokens_longer_than_what_is_taken() -> None:
    def check(made: int | None, context: int | None) -> list[tuple[str, str]]:
        tokens = TokenFacts(max_length=made)
        return summary(TokensLong, site("train", model=policy(context=context), data=data(tokens=tokens)))

    assert check(128, 64) == [WARNING]
    assert check(64, 64) == check(None, 64) == check(64, None) == []


def test_how_old_pairs_are() -> None:
    sampled = site("sample", node="pairs", model=policy("base.model"), prompts=data())
    first = site("train", node="first", model=policy("base.model"), data=data())
    second = site("train", first, node="second", model=policy("first.model"), data=data())
    at = site("train", sampled, second, model=policy("second.model"), data=data("pairs.data"))
    (found,) = findings(OffPolicy, at)
    assert "generated by base.model, 2 training stages earlier, but" in found.message
    other = site("train", sampled, model=policy("else.model"), data=data("pairs.data"))
    assert "earlier" not in findings(OffPolicy, other)[0].message


def test_held_out_rows_that_are_trained_on() -> None:
    def check(held: list[str], learned: list[str] | None) -> list[tuple[str, str]]:
        at = site(
            "train",
            model=policy(),
            data=data("chats.train", prompts=learned),
            eval=data("chats.test", prompts=held),
        )
        assert summary(Leakage, at) == [], "that is another rule's"
        return summary(HeldOutLeakage, at)

    assert check(["a"], ["a", "b"]) == [WARNING]
    assert check(["c"], ["a", "b"]) == []
    assert check(["c"], None) == [UNKNOWN]


def test_held_out_pairs_of_the_demonstrations_prompts_are_noted() -> None:
    sft = site(
        "train-tokens", node="sft", model=policy("base.model"), data=data("chats.data", prompts=["a", "b"])
    )
    at = site(
        "train",
        sft,
        model=policy("sft.model"),
        data=data("pairs.train", prompts=["a"]),
        eval=data("pairs.test", prompts=["b"]),
    )
    assert summary(HeldOutLeakage, at) == [("note", "predicted")]


def judged(digest: str | None = None, **facts: Any) -> Site:
    """A gate on one evaluation of two models."""
    one, other = (policy(f"{name}.model", architecture=name, verified=True) for name in ("dpo", "sft"))
    return site("judge", candidate=one, baseline=other, report=report(**facts))


CANDIDATE, BASELINE = (
    policy(f"{name}.model", architecture=name, verified=True).artifact.digest  # type: ignore[union-attr]
    for name in ("dpo", "sft")
)


def test_a_score_that_rests_on_no_answers() -> None:
    assert summary(ReportUnanswered, judged(unanswered={CANDIDATE: 1.0, BASELINE: 0.2})) == [ERROR]
    assert summary(ReportUnanswered, judged(unanswered={CANDIDATE: 0.9})) == []
    assert summary(ReportUnanswered, judged(unanswered={BASELINE: 1.0})) == [], "that is known of a baseline"
    assert summary(ReportUnanswered, judged()) == []


def test_a_score_of_exactly_0_or_1() -> None:
    def check(value: float, name: str = "exact_match", of: str = CANDIDATE) -> list[tuple[str, str]]:
        return summary(ReportExtreme, judged(figures={f"{name}[{of[:8]}]": value}))

    assert check(0.0) == check(1.0) == [WARNING]
    assert check(0.01) == check(1.0, "perplexity") == check(0.0, of=BASELINE) == []
    alone = judged(figures={"exact_match": 0.0}, subjects=(CANDIDATE,))
    assert summary(ReportExtreme, alone) == [WARNING]


def test_smoke_runs_say_that_answers_are_not_checked() -> None:
    at = judged(unanswered={CANDIDATE: 1.0}, figures={f"exact_match[{CANDIDATE[:8]}]": 0.0})
    smoke = Site(at.node, at.uses, at.stage, SimpleNamespace(check_answers=False), at.inputs, at.upstream)
    assert summary(ReportUnanswered, smoke) == summary(ReportExtreme, smoke) == []


def test_what_is_judged_was_evaluated() -> None:
    evaluated = site("measure", node="eval", models=[policy("sft.model"), policy("dpo.model")], data=data())
    right = site(
        "judge", evaluated, node="gate", candidate=policy("dpo.model"), baseline=policy("sft.model"),
        report=report("eval.report"),
    )  # fmt: skip
    assert summary(JudgedOther, right) == []
    wrong = site(
        "judge", evaluated, candidate=policy("new.model"), baseline=policy("sft.model"),
        report=report("eval.report"),
    )  # fmt: skip
    (found,) = findings(JudgedOther, wrong)
    assert found.message == "eval.report is about sft.model, dpo.model, not about new.model"
    for name, expected in (("dpo.model", []), ("sft.model", [ERROR])):
        at = site("promote", right, model=policy(name), verdict=report("gate.verdict"))
        assert summary(JudgedOther, at) == expected
    assert summary(JudgedOther, site("promote", model=policy("x.model"), verdict=report("y.verdict"))) == []


def test_a_model_beside_itself() -> None:
    one, other = policy("dpo.model"), policy("sft.model")
    assert summary(SameCompared, site("judge", candidate=one, baseline=one)) == [WARNING]
    assert summary(SameCompared, site("judge", candidate=one, baseline=other)) == []
    seeds = [policy(f"dpo[{seed}].model", architecture="a", verified=True) for seed in (1, 2)]
    assert summary(SameCompared, site("measure", models=seeds, data=data())) == [("warning", "verified")]
    assert summary(SameCompared, site("train", model=one, teacher=one)) == [], "a trainer may"


def test_reports_on_different_data() -> None:
    def check(*digests: str | None) -> list[tuple[str, str]]:
        reports = [report(f"e{i}.report", data=digest) for i, digest in enumerate(digests)]
        return summary(
            ReportsOfDifferentData, site("judge", candidate=policy(), baseline=policy(), report=reports)
        )

    assert check("a", "b") == [ERROR]
    assert check("a", "a") == check("a", None) == check("a") == []
