"""The conformance suites of rewards, rules and trainers over all that are registered, and on faulty ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from helpers.judges import with_tiny_model
from helpers.sites import data, policy, site
from pydantic import Field

from posttrain import Config, Family, Finding, Group, Level, Rule, Sample, Site, TokenBatch, Trainer
from posttrain.registry.discovery import discover
from posttrain_plugins.testing import (
    reward_conformance,
    rewards,
    rule_conformance,
    rules,
    trainer_conformance,
    trainers,
)
from posttrain_plugins.testing.suites import Nonconformance
from posttrain_plugins.trainers.sft import SftOptions
from posttrain_plugins.training.offline import OfflineTrainer

catalogue = discover()


@cache
def reward(name: str) -> rewards.RewardSubject:
    return rewards.RewardSubject(name, catalogue.load(Group.REWARD, name), {}, opener=with_tiny_model)


@cache
def rule(name: str) -> rules.RuleSubject:
    return rules.RuleSubject(name, catalogue.load(Group.RULE, name))


trainer = cache(trainers.trainer_subject)


@pytest.mark.parametrize("name", catalogue.names(Group.REWARD))
@pytest.mark.parametrize("check", rewards.CHECKS)
def test_a_registered_reward_conforms(name: str, check: str) -> None:
    rewards.CHECKS[check](reward(name))


@pytest.mark.parametrize("name", catalogue.names(Group.RULE))
def test_a_registered_rule_conforms(name: str) -> None:
    for check in rules.CHECKS.values():
        check(rule(name))


@pytest.mark.parametrize("name", catalogue.names(Group.TRAINER))
@pytest.mark.parametrize("check", trainers.CHECKS)
def test_a_registered_trainer_conforms(name: str, check: str) -> None:
    trainers.CHECKS[check](trainer(name))


class Length(Config):
    words: int = Field(default=3, ge=1, description="how many words an answer should have")


class SoundReward:
    """The share of the wanted words; abstains on empty answers."""

    config = Length

    def score(self, sample: Sample, config: Length) -> Any:
        words = len(sample.completion.split())
        return min(1.0, words / config.words) if words else None

    def __call__(self, samples: list[Sample], config: Length) -> Any:
        return [self.score(sample, config) for sample in samples]


class Missing(SoundReward):
    def __call__(self, samples, config):
        return [score for score in super().__call__(samples, config) if score is not None]


class Endless(SoundReward):
    def score(self, sample, config):
        return math.inf if not sample.finished else 0.0


class Truth(SoundReward):
    def score(self, sample, config):
        return bool(sample.completion)


class Normalized(SoundReward):
    """Scores against the mean of whoever is asked about together."""

    def __call__(self, samples, config):
        lengths = [len(sample.completion) for sample in samples]
        return [length - sum(lengths) / len(lengths) for length in lengths]


class Counting(SoundReward):
    asked = 0

    def __call__(self, samples, config):
        type(self).asked += 1
        return [float(self.asked)] * len(samples)


class Marking(SoundReward):
    def score(self, sample, config):
        sample.row["seen"] = True
        return 0.0


class Unexplained(SoundReward):
    class Options(Config):
        words: int = 3

    config = Options


class TwoArguments(SoundReward):
    def __call__(self, prompts, completions, answers):
        return []


FAULTY_REWARDS: Mapping[str, tuple[type, str]] = {
    "contract": (TwoArguments, r"__call__ must take \(samples, config\)"),
    "contract-option": (Unexplained, "the option 'words' has no description"),
    "scores": (Missing, "expected a list of as many"),
    "scores-infinite": (Endless, "expected a finite number, or None to abstain"),
    "scores-boolean": (Truth, "it gives True to 'ab'"),
    "rows": (Normalized, "among others, and .* alone"),
    "purity": (Marking, "it changes the samples"),
    "purity-again": (Counting, "the same samples get"),
}


def blamed(target: type, message: str) -> Any:
    return pytest.raises(
        Nonconformance, match=rf"{target.__name__} \(test_testing_conformance\.py:\d+\): .*{message}"
    )


@pytest.mark.parametrize("check", FAULTY_REWARDS)
def test_a_faulty_reward_is_found_and_blamed(check: str) -> None:
    reward, message = FAULTY_REWARDS[check]
    with blamed(reward, message):
        rewards.CHECKS[check.partition("-")[0]](rewards.RewardSubject(reward.__name__, reward, {}))


class Shortage(Rule):
    """Training on few rows is seldom meant."""

    code = "ACME01"
    title = "few rows to train on"
    level = Level.ERROR
    fix = "use more rows"

    def check(self, site: Site) -> Iterator[Finding]:
        for port in site.stage.inputs:
            for each in site.inputs.get(port.name, ()):
                if port.training and each.facts.rows is not None and each.facts.rows < 100:
                    yield self.finding(f"{each.origin} has only {each.facts.rows} rows", each, port=port.name)


class Hasty(Shortage):
    def check(self, site):
        for port in site.stage.inputs:
            for each in site.inputs.get(port.name, ()):
                if port.training and not each.facts.rows:
                    yield self.finding("there are no rows", each)


class Crashing(Shortage):
    def check(self, site):
        return [self.finding("few") for each in site.inputs.get("data", ()) if each.facts.rows < 100]


class Coded(Shortage):
    code = "few rows"


class Blind(Shortage):
    def check(self, site):
        return ()


class Unmended(Shortage):
    def check(self, site):
        for each in super().check(site):
            yield replace(each, fix="")


def training_on(rows: int | None) -> Site:
    return site("train", model=policy(), data=data(rows=rows))


SITES = {"silent": [training_on(1000), training_on(None)], "fires": [training_on(7)]}
FAULTY_RULES: Mapping[str, tuple[type[Rule], str]] = {
    "contract": (Coded, "`code` must be letters and a number"),
    "unknown_facts": (Hasty, "whose inputs have no known facts: there are no rows"),
    "silent": (Hasty, "at the sound site 'train'"),
    "fires": (Blind, "it reports nothing at the faulty site 'train'"),
    "fires-fix": (Unmended, "a finding needs the rule's code, a message and a fix"),
}


@pytest.mark.parametrize("check", FAULTY_RULES)
def test_a_faulty_rule_is_found_and_blamed(check: str) -> None:
    rule, message = FAULTY_RULES[check]
    with blamed(rule, message):
        rules.CHECKS[check.partition("-")[0]](rules.RuleSubject(rule.__name__, rule, **SITES))


def test_a_rule_that_raises_on_unknown_facts_fails() -> None:
    with pytest.raises(TypeError):
        rules.CHECKS["unknown_facts"](rules.RuleSubject("crashing", Crashing))


class SoundTrainer(OfflineTrainer):
    """Train on the better answers of pairs."""

    config = SftOptions
    family = Family.TOKEN
    formats = frozenset({"preference"})

    def passages(self, row, format, needs):
        return format.passages(row)[:1]

    def batch(self, scores, config):
        example, weight = scores.sequence, scores.weight[scores.sequence]
        return TokenBatch(scores.logp, scores.entropy, scores.top1, example, weight, squares=scores.squares)


class Both(SoundTrainer):
    """Learns from some rows one answer and from others two."""

    def passages(self, row, format, needs):
        return format.passages(row)[: 1 + len(row["chosen"]) % 2]


class Popping(SoundTrainer):
    def passages(self, row, format, needs):
        return format.passages({**row, "chosen": row.pop("chosen")})[:1]


class WrongBatch(SoundTrainer):
    def batch(self, scores, config):
        return scores


class Detached(SoundTrainer):
    def batch(self, scores, config):
        made = super().batch(scores, config)
        return replace(made, logp=made.logp * 0)


class PerBatch(SoundTrainer):
    """Weighs tokens by how many there are in the micro-batch."""

    def batch(self, scores, config):
        made = super().batch(scores, config)
        return replace(made, weight=made.weight / len(made.logp))


class FirstRow(SoundTrainer):
    """The first example of a micro-batch counts double."""

    def batch(self, scores, config):
        made = super().batch(scores, config)
        return replace(made, weight=made.weight * (1 + (made.example == 0).to(made.weight)))


class NeverReady(SoundTrainer):
    def invariants(self, metrics, config):
        return ["the moon is full"]


FAULTY_TRAINERS: Mapping[str, tuple[type[Trainer], str]] = {
    "rows": (Popping, "it changes the rows"),
    "rows-roles": (Both, "rows become different sequences"),
    "batch": (WrongBatch, "`batch` returned Scores, no batch of token"),
    "learns": (Detached, "every gradient is zero"),
    "cut": (PerBatch, "in micro-batches of 1 tokens, padded"),
    "cut-first": (FirstRow, "in micro-batches of 1 tokens, padded"),
    "step_zero": (NeverReady, "its own invariants do not hold at step 0: the moon is full"),
}


@pytest.mark.parametrize("check", trainers.CHECKS)
def test_a_sound_trainer_passes(check: str) -> None:
    trainers.CHECKS[check](trainer(SoundTrainer))


@pytest.mark.parametrize("check", FAULTY_TRAINERS)
def test_a_faulty_trainer_is_found_and_blamed(check: str) -> None:
    faulty, message = FAULTY_TRAINERS[check]
    with blamed(faulty, message):
        trainers.CHECKS[check.partition("-")[0]](trainers.trainer_subject(faulty))


def test_a_trainer_of_a_format_without_rows_asks_for_them() -> None:
    class Foreign(SoundTrainer):
        formats = frozenset({"acme/riddles"})

    with pytest.raises(Nonconformance, match="give the suite `rows` and their `format`"):
        trainers.trainer_subject(Foreign)


def test_suites_are_strict_about_exceptions() -> None:
    for made in (
        reward_conformance(SoundReward, except_={"scores": "a reason"}),
        rule_conformance(Shortage, except_={"silent": "a reason"}),
        trainer_conformance(SoundTrainer, except_={"cut": "a reason"}),
    ):
        (marked,) = [test for test in vars(made).values() if hasattr(test, "pytestmark")]
        assert marked.pytestmark[0].kwargs == {"reason": "a reason", "strict": True}


TestReward = reward_conformance(SoundReward, {"words": 5}, samples=[Sample((), "one two three")])
TestRule = rule_conformance(Shortage, **SITES)
