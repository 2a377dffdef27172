"""The conformance suite of rewards."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from posttrain.contracts.registration import Group
from posttrain.contracts.reward import ModelReward, Sample, Scorer
from posttrain.registry.components import validate_config
from posttrain.registry.discovery import discover
from posttrain.registry.validation import config_of, faults
from posttrain_plugins.testing.suites import Check, Nonconformance, place_of, suite

__tracebackhide__ = True

_TURN = ({"role": "user", "content": "say ab"},)
SAMPLES = (
    Sample(_TURN, "ab", {"answer": "ab"}),
    Sample(_TURN, "", {"answer": "ab"}),
    Sample(_TURN, "AB, and so on", {"answer": "ab"}, finished=False),
    Sample(_TURN, "ä\n\t\U0001f642", {"answer": 3}),
    Sample(_TURN, "a " * 500, {"answer": ["ab", None]}),
    Sample((), "ab", {}),
)
"""Completions that policies come up with: right, empty, cut off, odd, long, and one of which nothing is known."""
ROUNDED = 1e-4
"""Largest difference of a model's score in other company, as a share of it (of 1 where it is smaller): sums of float32
in another order. A reward without a model gives the very same."""
Opener = Callable[[Any, Any], Scorer]
"""Given a `ModelReward` and its options, opens it with some model."""


@dataclass(frozen=True)
class RewardSubject:
    """A reward under test.

    Args:
        label: What people call it.
        reward: The class or function.
        options: Its options; the defaults where left out.
        samples: Completions of its domain, beside those that any reward has to bear.
        opener: How it gets its model, where it judges with one.
    """

    label: str
    reward: Any
    options: Mapping[str, Any]
    samples: Sequence[Sample] = ()
    opener: Opener | None = None

    @cached_property
    def config(self) -> Any:
        """Its validated options."""
        return validate_config(config_of(self.reward), self.options, discover())

    @property
    def all(self) -> list[Sample]:
        """Every sample that it is asked about."""
        return [*self.samples, *SAMPLES]

    @cached_property
    def judge(self) -> Scorer | None:
        """What scores with a model, opened once; None for a reward that has none."""
        if not (isinstance(self.reward, type) and issubclass(self.reward, ModelReward)):
            return None
        if self.opener is None:
            raise self.refuse("it judges with a model: say with `opener` how it gets one")
        return self.opener(self.reward(), self.config)

    def scores(self, samples: Sequence[Sample]) -> Any:
        """Ask it, as a new instance where it is a class without a model."""
        if self.judge is not None:
            return self.judge(list(samples))
        plugin = self.reward() if isinstance(self.reward, type) else self.reward
        return plugin(list(samples), self.config)

    def agree(self, found: Any, given: Any) -> bool:
        """Whether two lists of scores are the same; those of a model up to rounding."""
        if self.judge is None:
            return bool(found == given)
        return len(found) == len(given) and all(map(_close, found, given))

    def refuse(self, message: str) -> Nonconformance:
        """Return the error that says what is wrong with the reward, and where it is written."""
        return Nonconformance(f"{self.label} ({place_of(self.reward)}): {message}")


def contract(subject: RewardSubject) -> None:
    """It takes (samples, config), and its options are described."""
    wrong = list(faults(Group.REWARD, subject.reward))
    if wrong:
        raise subject.refuse("; ".join(wrong))
    for name, field in type(subject.config).model_fields.items():
        if not field.description:
            raise subject.refuse(f"the option {name!r} has no description")


def scores(subject: RewardSubject) -> None:
    """There is one finite number for each sample, or None to abstain."""
    given = subject.scores(subject.all)
    if not isinstance(given, list) or len(given) != len(subject.all):
        raise subject.refuse(
            f"it returned {given!r:.120} for {len(subject.all)} samples, expected a list of as many"
        )
    for sample, score in zip(subject.all, given, strict=True):
        number = isinstance(score, int | float) and not isinstance(score, bool) and math.isfinite(score)
        if score is not None and not number:
            raise subject.refuse(
                f"it gives {score!r} to {sample.completion!r:.40}; expected a finite number, or None to abstain"
            )
    if subject.scores([]) != []:
        raise subject.refuse("it returned something for no samples")


def rows(subject: RewardSubject) -> None:
    """A score belongs to its sample: another order, or a sample alone, has the same scores."""
    samples = subject.all
    given = subject.scores(samples)
    if not subject.agree(subject.scores(samples[::-1]), given[::-1]):
        raise subject.refuse("in another order the samples get other scores")
    for sample, score in zip(samples, given, strict=True):
        alone = subject.scores([sample])
        if not subject.agree(alone, [score]):
            raise subject.refuse(f"{sample.completion!r:.40} gets {score} among others, and {alone} alone")


def purity(subject: RewardSubject) -> None:
    """The same samples get the same scores, and stay as they are."""
    samples = subject.all
    kept = copy.deepcopy(samples)
    first, second = subject.scores(samples), subject.scores(samples)
    if samples != kept:
        raise subject.refuse("it changes the samples that it is given")
    if first != second:
        raise subject.refuse(f"the same samples get {first} and then {second}")


def _close(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=ROUNDED, abs_tol=ROUNDED)


CHECKS: Mapping[str, Check[RewardSubject]] = {
    "contract": Check(contract),
    "scores": Check(scores),
    "rows": Check(rows),
    "purity": Check(purity),
}
"""What must hold of every reward."""


def reward_conformance(
    reward: Any,
    options: Mapping[str, Any] | None = None,
    *,
    samples: Sequence[Sample] = (),
    opener: Opener | None = None,
    except_: Mapping[str, str] | None = None,
    files: Sequence[str | Path] = (),
) -> type:
    """Return the conformance suite of a reward as a class of tests.

    Args:
        reward: The name it is registered by, or the class or function, which need not be registered.
        options: Its options; the defaults where left out.
        samples: Completions of its domain, beside those that any reward has to bear.
        opener: Of a `ModelReward`, what opens it with a model: `lambda reward, config: reward.open(…)`.
        except_: Checks that it is known not to pass, each with the reason. One that passes all the same fails.
        files: Local plugin files in which the name may be.

    Raises:
        SpecError: `except_` names no check, or gives no reason.
    """

    def subject() -> RewardSubject:
        found, label = reward, getattr(reward, "__name__", "the reward")
        if isinstance(reward, str):
            found, label = discover([Path(file) for file in files]).load(Group.REWARD, reward), reward
        return RewardSubject(label, found, dict(options or {}), samples, opener)

    return suite(CHECKS, subject, except_)
