"""The conformance suite of losses: each check finds the fault it is there for, and names the loss and its line."""

from __future__ import annotations

import doctest
import importlib
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Self

import pytest
import torch
from pydantic import Field, model_validator

from posttrain import (
    EXAMPLE_MEAN,
    SEQUENCE_MEAN,
    Config,
    Family,
    Group,
    Loss,
    LossOutput,
    Need,
    PreferenceBatch,
    RewardBatch,
    Scope,
    Term,
    UnpairedBatch,
)
from posttrain.contracts.loss import Absent
from posttrain.errors import PluginError, SpecError
from posttrain.registry.discovery import discover
from posttrain.registry.validation import HELD
from posttrain_plugins.testing import conformance, draws, part_of
from posttrain_plugins.testing.losses.conformance import CHECKS
from posttrain_plugins.testing.losses.subject import LossSubject, loss_subject
from posttrain_plugins.testing.suites import Nonconformance
from posttrain_plugins.testing.trainers import trainer_subject


class Options(Config):
    beta: float = Field(default=0.5, gt=0, description="strength of the pull to the reference policy")


class IdleOptions(Options):
    smoothing: float = Field(
        default=0.0, ge=0, lt=0.5, description="share of pairs that are the wrong way round"
    )


class ListedOptions(Options):
    names: list[str] = Field(default=[], description="what counts half")


class ShiftedOptions(Options):
    shifted: bool = Field(default=False, description="whether the margin is shifted")
    shift: float = Field(default=1.0, gt=0, description="by how much")

    @model_validator(mode="after")
    def _used(self) -> Self:
        if self.shift != 1.0 and not self.shifted:
            raise ValueError("shift would be ignored without shifted")
        return self


class Sound(Loss):
    """L = −log σ(β Δ), averaged over pairs.

    Example:
        ln(1 + e^−1)

        >>> worked(Sound, chosen=[-1.0], rejected=[-3.0])
        0.3133
    """

    family = Family.PREFERENCE
    config = Options
    needs = frozenset({Need.REFERENCE})

    def scaled(self, batch: PreferenceBatch, config: Options) -> torch.Tensor:
        return config.beta * batch.margin

    def values(self, batch: PreferenceBatch, config: Options) -> torch.Tensor:
        return -torch.nn.functional.logsigmoid(self.scaled(batch, config)) * batch.weight

    def told(self, batch: PreferenceBatch, config: Options) -> dict[str, Any]:
        return {"rewards/margin": self.scaled(batch, config).detach()}

    def __call__(self, batch: PreferenceBatch, config: Options, stats: Any, state: Any) -> LossOutput:
        return LossOutput([Term(self.values(batch, config), EXAMPLE_MEAN)], self.told(batch, config))


class WrongSignature(Sound):
    def __call__(self, batch, config):
        return LossOutput([])


class Undescribed(Sound):
    class Config(Config):
        beta: float = 0.5

    config = Config


class Scalar(Sound):
    def values(self, batch, config):
        return super().values(batch, config).mean()


class Detached(Sound):
    def values(self, batch, config):
        return super().values(batch, config).detach()


class Unreduced(Sound):
    """One value a pair, but reduced over sequences."""

    def __call__(self, batch, config, stats, state):
        return LossOutput([Term(self.values(batch, config), SEQUENCE_MEAN)])


class Silent(Sound):
    def __call__(self, batch, config, stats, state):
        return LossOutput([])


class NotANumber(Sound):
    def values(self, batch, config):
        return (super().values(batch, config) - 10).sqrt()


class NotANumberBehind(Sound):
    """Its values are finite; the gradient of what `where` leaves out is not."""

    def values(self, batch, config):
        scaled = self.scaled(batch, config)
        return torch.where(scaled < 0, 1 - scaled, (1 - scaled.clamp(max=0)).log() * 0 - (scaled * 0).sqrt())


class Flat(Sound):
    def values(self, batch, config):
        return batch.chosen * 0


class WrongGradient(Sound):
    def values(self, batch, config):
        return super().values(batch, config) * self.scaled(batch, config).detach().exp()


class FirstCounts(Sound):
    """The first pair of a batch counts double."""

    def values(self, batch, config):
        factor = torch.ones_like(batch.weight)
        factor[0] = 2
        return super().values(batch, config) * factor


class Averaged(Sound):
    """Each pair against the mean of the others, without saying so."""

    def values(self, batch, config):
        scaled = self.scaled(batch, config)
        return -torch.nn.functional.logsigmoid(scaled - scaled.mean()) * batch.weight


class Unadditive(Sound):
    def measure(self, batch, config, state):
        return {"mean": batch.margin.mean()}


class Shapeless(Sound):
    def measure(self, batch, config, state):
        return {"margins": batch.margin}


class Weightless(Sound):
    def values(self, batch, config):
        return super().values(replace(batch, weight=torch.ones_like(batch.weight)), config)


class Squared(Sound):
    """A weight that counts twice; one of 0 or 1 does not show it."""

    def values(self, batch, config):
        return super().values(batch, config) * batch.weight


class Counted(Sound):
    """Rows of weight 0 count in its baseline."""

    def measure(self, batch, config, state):
        return {"sum": batch.margin.sum(), "pairs": batch.margin.new_full((), len(batch.margin))}

    def __call__(self, batch, config, stats, state):
        mean = (stats["sum"] / stats["pairs"]).to(batch.weight)
        values = -torch.nn.functional.logsigmoid(config.beta * (batch.margin - mean)) * batch.weight
        return LossOutput([Term(values, EXAMPLE_MEAN)])


class UndeclaredMargin(Loss):
    """Takes the margin of a batch that has none, as it is not declared."""

    family = Family.REWARD
    needs = frozenset({Need.RIVALS})

    def __call__(self, batch: RewardBatch, config, stats, state):
        return LossOutput([Term((batch.margin - 1).square() * batch.weight, EXAMPLE_MEAN)])


class OneClass(Loss):
    """Each answer against the mean of the bad ones."""

    family = Family.UNPAIRED

    def measure(self, batch, config, state):
        return {"sum": batch.logp[~batch.desirable].sum(), "bad": (~batch.desirable).sum()}

    def __call__(self, batch: UnpairedBatch, config, stats, state):
        mean = (stats["sum"] / stats["bad"]).to(batch.logp)
        return LossOutput([Term((mean - batch.logp) * batch.weight, EXAMPLE_MEAN)])


class Ties(Loss):
    """The mean over the pairs of a batch, of which there may be none."""

    family = Family.REWARD
    scope = Scope.STEP

    def __call__(self, batch: RewardBatch, config, stats, state):
        better, worse = batch.pairs
        mean = -torch.nn.functional.logsigmoid(batch.reward[better] - batch.reward[worse]).mean()
        return LossOutput([Term(mean * batch.weight, EXAMPLE_MEAN)])


class Exponential(Sound):
    def values(self, batch, config):
        return (-self.scaled(batch, config)).exp() * batch.weight


class Logarithm(Sound):
    """Finite where a naive log of a sigmoid is, and no longer beyond it."""

    def values(self, batch, config):
        return -self.scaled(batch, config).sigmoid().log() * batch.weight


class Rough(Sound):
    def values(self, batch, config):
        return (batch.margin * 1000).cos() * batch.weight


class Backwards(Sound):
    """L = −log σ(−β Δ)."""

    def scaled(self, batch, config):
        return -super().scaled(batch, config)


class Attached(Sound):
    def told(self, batch, config):
        return {"rewards/margin": self.scaled(batch, config)}


class Untold(Sound):
    metrics = frozenset({"rewards/margin", "rewards/gone"})


class Misnamed(Sound):
    def told(self, batch, config):
        return {"Margin of Rewards": self.scaled(batch, config).detach()}


class Premature(Sound):
    """The mean over a batch, which is not that over the step."""

    def told(self, batch, config):
        return {"rewards/margin": self.scaled(batch, config).detach().mean()}


class Infinite(Sound):
    def told(self, batch, config):
        return {"rewards/ratio": self.scaled(batch, config).detach() / 0}


class Undeclared(Sound):
    needs = frozenset()


class UndeclaredTokens(Sound):
    def values(self, batch, config):
        return super().values(batch, config) - batch.tokens.reference.sum()


class Forgetful(Sound):
    def needs_of(self, config):
        return frozenset()


class Unseeded(Sound):
    def values(self, batch, config):
        return super().values(batch, config) * torch.rand(len(batch.weight))


class Altering(Sound):
    def values(self, batch, config):
        batch.weight.mul_(2)
        return super().values(batch, config)


class Remembering(Sound):
    def begin(self, config):
        return {"steps": 0}

    def __call__(self, batch, config, stats, state):
        state["steps"] += 1
        return super().__call__(batch, config, stats, state)


class Unkeepable(Sound):
    def begin(self, config):
        return {"mean": torch.zeros(())}


class Undocumented(Sound):
    """L = −log σ(β Δ)."""


class Miscalculated(Sound):
    """L = −log σ(β Δ).

    Example:
        >>> worked(Miscalculated, chosen=[-1.0], rejected=[-3.0])
        0.5
    """


class Idle(Sound):
    config = IdleOptions


class Listed(Sound):
    config = ListedOptions

    def scaled(self, batch: PreferenceBatch, config: Any) -> torch.Tensor:
        return super().scaled(batch, config) * (0.5 if "half" in config.names else 1)


class Shifted(Sound):
    config = ShiftedOptions

    def scaled(self, batch: PreferenceBatch, config: Any) -> torch.Tensor:
        return super().scaled(batch, config) - config.shift * config.shifted


class Unshifted(Sound):
    config = ShiftedOptions

    def scaled(self, batch: PreferenceBatch, config: Any) -> torch.Tensor:
        return super().scaled(batch, config) - float(config.shifted)


class Bare(Sound):
    def __call__(self, batch, config, stats, state):
        return self.values(batch, config)


FAULTY: Mapping[str, tuple[type[Loss], str]] = {
    "options": (Undescribed, "the option 'beta' has no description"),
    "terms": (Scalar, r"term 0 has values of shape \(\); example_mean takes"),
    "terms-detached": (Detached, "term 0 has no gradient"),
    "terms-reduction": (
        Unreduced,
        r"shape \(4,\); sequence_mean takes 15 tokens or 8 sequences|takes \d+ tokens",
    ),
    "terms-none": (Silent, "at least one term"),
    "terms-bare": (Bare, "must return a LossOutput"),
    "finite": (NotANumber, "value 0 of term 0 is nan on ordinary numbers"),
    "finite-gradient": (NotANumberBehind, "the gradient of `logp` is (nan|-?inf) on ordinary numbers"),
    "finite-flat": (Flat, "every gradient is zero"),
    "gradcheck": (WrongGradient, "its gradient is not that of finite differences"),
    "row_order": (FirstCounts, "in another order of rows"),
    "split": (Averaged, "where the step is cut into parts"),
    "split-sums": (Unadditive, "'mean' does not add up"),
    "split-shapes": (Shapeless, "other names or shapes in other parts"),
    "split-metrics": (Premature, "the metric 'rewards/margin' is .* return one value for each token"),
    "isolation": (Averaged, r"declare `scope = Scope.STEP`"),
    "proportion": (Squared, "with every weight doubled the loss is"),
    "weightless": (Weightless, "a row of weight 0 has a gradient"),
    "absence": (Counted, "numbers of a row of weight 0 change"),
    "edges": (OneClass, r"is nan in a step of one row"),
    "edges-ties": (Ties, "is nan where all answers have one score"),
    "extremes": (Exponential, r"is inf with numbers of ±10000"),
    "extremes-gradient": (Logarithm, r"is (inf|nan|-inf) with numbers of ±10000"),
    "low_precision": (Rough, "of its value in float32"),
    "monotone": (Backwards, "it rises where a (better|worse) answer becomes"),
    "metrics": (Attached, "the metric 'rewards/margin' is not detached"),
    "metrics-declared": (Untold, "`metrics` has to name what it tells, and differs in .*rewards/gone"),
    "metrics-name": (Misnamed, "needs a name of lower-case words"),
    "metrics-infinite": (Infinite, "is not finite on ordinary numbers"),
    "effects": (Idle, "the option 'smoothing' has no effect"),
    "effects-list": (Listed, "no other value of the option 'names' was found that validates"),
    "needs": (Undeclared, "it reads what it does not declare"),
    "needs-tokens": (UndeclaredTokens, "it reads what it does not declare"),
    "needs-margin": (UndeclaredMargin, "it reads what it does not declare"),
    "needs-options": (Forgetful, "`needs_of` leaves out reference"),
    "purity": (Unseeded, "other values the second time"),
    "purity-batch": (Altering, "it changes `weight` of the batch"),
    "purity-state": (Remembering, "it changes its state in __call__"),
    "resume": (Unkeepable, "its state is no JSON"),
    "example": (Undocumented, "its docstring has no example"),
    "example-wrong": (Miscalculated, r"is wrong:[\s\S]*Expected:\s+0.5\s+Got:\s+0.3133"),
}
"""Every check, after which a dash may tell faults apart, with a loss that it has to find."""


def check(name: str, subject: LossSubject) -> None:
    CHECKS[name.partition("-")[0]](subject)


@pytest.mark.parametrize("name", CHECKS)
def test_a_sound_loss_passes(name: str) -> None:
    check(name, loss_subject(Sound, {"beta": 0.1}, "margin"))


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize("name", FAULTY)
def test_a_fault_is_found_and_blamed(name: str) -> None:
    loss, message = FAULTY[name]
    with pytest.raises(Nonconformance, match=message) as caught:
        check(name, loss_subject(loss, None, "margin"))
    assert re.match(rf"{loss.__name__} \(test_testing_losses\.py:\d+\): ", str(caught.value))


@pytest.mark.parametrize("name", [name for name in FAULTY if name.startswith("terms")])
def test_no_check_fails_over_terms_that_are_none(name: str) -> None:
    for each in CHECKS:
        with suppress(Nonconformance):
            check(each, loss_subject(FAULTY[name][0], None, "margin"))


def test_every_check_has_a_fault_to_find() -> None:
    found = {name.partition("-")[0] for name in FAULTY}
    assert set(CHECKS) - found == {"contract"}


def test_a_wrong_signature_is_told_before_anything_else() -> None:
    with pytest.raises(
        Nonconformance, match=r"WrongSignature \(.*\) is no loss: __call__ must take \(batch, "
    ):
        loss_subject(WrongSignature)


def test_a_name_that_nothing_has_is_a_plugin_error() -> None:
    with pytest.raises(PluginError, match="did you mean `sigmoid`"):
        loss_subject("sigmod")


def test_an_option_may_be_excused_and_is_then_known_to_be_idle() -> None:
    reason = {"smoothing": "it tells of an evaluation alone"}
    check("effects", loss_subject(Idle, idle=reason))
    with pytest.raises(Nonconformance, match="'beta' is excused as idle, and has an effect"):
        check("effects", loss_subject(Idle, idle={**reason, "beta": "a reason"}))
    with pytest.raises(Nonconformance, match="it has no option smoothness; it has beta, smoothing"):
        check("effects", loss_subject(Idle, idle={"smoothness": "a reason"}))
    with pytest.raises(SpecError, match="needs a reason"):
        conformance(Idle, idle={"smoothing": ""})


def test_an_option_of_any_type_is_tried_with_the_value_that_its_author_names() -> None:
    check("effects", loss_subject(Listed, others={"names": ["half"]}))
    with pytest.raises(Nonconformance, match="the option 'names' has no effect"):
        check("effects", loss_subject(Listed, others={"names": ["whole"]}))


def test_an_option_that_is_refused_alone_is_tried_beside_others() -> None:
    check("effects", loss_subject(Shifted))
    with pytest.raises(Nonconformance, match="the option 'shift' has no effect"):
        check("effects", loss_subject(Unshifted))


def test_an_exception_names_a_check_and_a_reason() -> None:
    with pytest.raises(SpecError, match="did you mean `monotone`"):
        conformance(Sound, except_={"monotony": "a reason"})
    with pytest.raises(SpecError, match="needs a reason"):
        conformance(Sound, except_={"monotone": " "})


TestSound = conformance(Sound, {"beta": 2.0}, monotone="margin")
TestBackwards = conformance(
    Backwards, monotone="margin", except_={"monotone": "its sign is wrong", "example": "as is its example"}
)


def test_an_exception_is_strict_and_nothing_else_is_excused() -> None:
    (mark,) = TestBackwards.test_monotone.pytestmark
    assert (mark.name, mark.kwargs) == ("xfail", {"reason": "its sign is wrong", "strict": True})
    assert not hasattr(TestBackwards.test_finite, "pytestmark")


def test_an_author_need_not_register_anything_before_the_first_test_runs() -> None:
    made = conformance("sigmod")
    with pytest.raises(PluginError, match="there is no loss 'sigmod'"):
        made().test_finite()


@pytest.mark.parametrize("module", ["draws", "worked"])
def test_examples_in_docstrings_hold(module: str) -> None:
    failed, attempted = doctest.testmod(importlib.import_module(f"posttrain_plugins.testing.{module}"))
    assert failed == 0
    assert attempted > 0


def looks(batch: Any) -> dict[str, Any]:
    """What of a batch a loss could stumble over: what is there, of which shape and kind."""
    found: dict[str, Any] = {}
    for name, value in vars(batch).items():
        if isinstance(value, torch.Tensor):
            found[name] = (value.dim(), value.is_floating_point(), value.dtype is torch.bool)
        else:
            found[name] = repr(value) if isinstance(value, Absent | None) else looks(value)
    return found


@pytest.mark.parametrize("uses", discover().names(Group.TRAINER))
def test_drawn_batches_look_like_those_of_trainers(uses: str) -> None:
    subject = trainer_subject(uses)
    made = subject.stepper()
    micro = next(iter(made.micro_batches([each.learned for each in subject.examples])))
    expected = subject.trainer.batch(made.score(micro), subject.config)
    found = draws.draw(subject.trainer.family, made.needs, dtype=torch.float32).batch()
    assert looks(found) == looks(expected)


@pytest.mark.parametrize("family", Family)
def test_rows_can_be_taken_out_and_put_together_again(family: Family) -> None:
    whole = draws.draw(family, frozenset(Need) & HELD[family], seed=1, examples=5)
    order = [3, 1, 4, 0, 2]
    taken = whole.take(order)
    sequences, tokens = whole.places(order)
    assert torch.equal(taken.tokens["logp"], whole.tokens["logp"][tokens])
    assert torch.equal(taken.lengths, whole.lengths[sequences])
    assert torch.equal(taken.owner, taken.owner.sort().values)
    again = taken.take([order.index(row) for row in range(5)])
    assert torch.equal(again.tokens["value"], whole.tokens["value"])
    assert again.counts == whole.counts
    assert len(part_of(whole.batch()).lengths) == len(whole.owner) or family is Family.TOKEN
