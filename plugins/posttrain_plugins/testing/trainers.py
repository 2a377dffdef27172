"""The conformance suite of trainers: from rows to the gradient of a tiny model."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from posttrain.contracts.component import Choice, Component
from posttrain.contracts.loss import REFERENCES, Need
from posttrain.contracts.registration import Group
from posttrain.contracts.trainer import Example, Trainer
from posttrain.registry.catalogue import Catalogue
from posttrain.registry.components import resolve, validate_config
from posttrain.registry.discovery import discover
from posttrain.registry.validation import faults
from posttrain_plugins.testing.rows import ROWS
from posttrain_plugins.testing.suites import Check, Nonconformance, place_of, suite

if TYPE_CHECKING:
    from torch import Tensor

    from posttrain_plugins.training.step import Stepper
    from posttrain_plugins.training.tally import StepResult

__tracebackhide__ = True

_PLENTY = 10_000
_BUDGETS = (1, 60)
"""Tokens of a micro-batch: an example each, and a few."""
_TOLERANCE = 1e-5
"""Largest difference between gradients, as a share of the largest element."""


@dataclass(frozen=True)
class TrainerSubject:
    """A trainer under test, on a tiny model with a character tokenizer.

    Args:
        label: What people call it.
        trainer: The trainer itself.
        options: Its options; the defaults where left out.
        rows: Rows to train on.
        format: The format of the rows.
        catalogue: Where its loss is looked up.
    """

    label: str
    trainer: Trainer
    options: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    format: str
    catalogue: Catalogue

    @cached_property
    def config(self) -> Any:
        """Its validated options."""
        return validate_config(self.trainer.config, self.options, self.catalogue)

    @cached_property
    def loss(self) -> Component:
        """The loss that its options name; several of them as one."""
        from posttrain_plugins.training.objective import mixed

        named = self.config.loss
        if isinstance(named, Choice):
            return resolve(named, Group.LOSS, self.catalogue)
        parts = [resolve(each, Group.LOSS, self.catalogue) for each in named]
        return mixed(parts, self.config.loss_weights)

    @cached_property
    def needs(self) -> frozenset[Need]:
        """What its batches hold beside log-probs."""
        needed: frozenset[Need] = self.loss.plugin.needs_of(self.loss.config)
        return needed | self.trainer.needs(self.config)

    @cached_property
    def encoder(self) -> Any:
        """A tokenizer of characters with a chat template."""
        from posttrain_plugins.templates.encoder import Encoder
        from posttrain_plugins.testing.models import char_tokenizer

        with TemporaryDirectory() as directory:
            char_tokenizer(Path(directory))
            return Encoder.open(Path(directory))

    def prepared(self) -> list[Example]:
        """Turn the rows into examples, as training does."""
        from posttrain_plugins.data import formats
        from posttrain_plugins.preparation.examples import prepare

        format = formats.format_of(self.format)
        return prepare(
            self.trainer,
            self.trainer.rows(self.rows, format, self.needs, seed=0),
            self.encoder,
            format,
            max_length=None,
            truncation="error",
            weight_column=None,
            supervise=self.trainer.supervise(self.config),
            needs=self.needs,
        ).examples

    @cached_property
    def examples(self) -> list[Example]:
        """The examples, with weights that differ."""
        return [replace(each, weight=0.5 + each.row % 3) for each in self.prepared()]

    def stepper(self, tokens: int = _PLENTY, layout: str = "padded") -> Stepper:
        """Return a stepper over a new tiny model, always the same one."""
        from posttrain_plugins.backends.single import Single
        from posttrain_plugins.testing.models import tiny_judge, tiny_llama
        from posttrain_plugins.training.batches import Budget, probe
        from posttrain_plugins.training.head import choose_head, choose_value_head
        from posttrain_plugins.training.layouts import LAYOUTS
        from posttrain_plugins.training.step import Stepper

        make: Any = tiny_llama
        given = {"attn_implementation": "sdpa", "max_position_embeddings": 4096}
        if self.trainer.valued:
            make, given = tiny_judge, {**given, "kind": getattr(self.trainer, "kind", None)}
        model = make(self.encoder.vocabulary, **given).train()
        first = LAYOUTS["padded"].arrange(probe(self.examples), 0, "cpu")
        head = choose_value_head(model, first) if self.trainer.valued else choose_head(model, first, 1e-4)[0]
        made = Stepper(
            model=model,
            trainer=self.trainer,
            loss=self.loss,
            pad=0,
            budget=Budget(tokens),
            head=head,
            layout=LAYOUTS[layout],
            parallel=Single(),
            config=self.config,
        )
        if made.needs & REFERENCES:
            made.reference = self._reference(made)
        return made

    def _reference(self, made: Stepper) -> dict[int, Tensor]:
        """Return what the model itself says, as before a first update."""
        score = made.log_probs if Need.REFERENCE_TOKENS in made.needs else made.totals
        return score(self.examples, lambda done: None)

    def step(self, tokens: int = _PLENTY, layout: str = "padded") -> tuple[StepResult, list[Tensor]]:
        """Take a step; return what it came to and the gradient of every parameter."""
        made = self.stepper(tokens, layout)
        result = made.backward(self.examples)
        return result, [each.grad.clone() for each in made.model.parameters() if each.grad is not None]

    @cached_property
    def whole(self) -> tuple[StepResult, list[Tensor]]:
        """The step in one micro-batch, padded."""
        return self.step()

    def refuse(self, message: str) -> Nonconformance:
        """Return the error that says what is wrong with the trainer, and where it is written."""
        return Nonconformance(f"{self.label} ({place_of(type(self.trainer))}): {message}")


def contract(subject: TrainerSubject) -> None:
    """Its class attributes and signatures are those of a trainer, and it takes rows of its formats."""
    wrong = list(faults(Group.TRAINER, type(subject.trainer)))
    if wrong:
        raise subject.refuse("; ".join(wrong))
    if subject.format not in subject.trainer.formats:
        raise subject.refuse(f"it does not take rows of the format {subject.format!r}")


def options(subject: TrainerSubject) -> None:
    """Options survive JSON, and every one is described."""
    again = validate_config(subject.trainer.config, subject.config.model_dump(mode="json"), subject.catalogue)
    if again != subject.config:
        raise subject.refuse(f"its options do not survive JSON: {subject.config!r} becomes {again!r}")
    told = "\n".join(base.__doc__ or "" for base in type(subject.config).__mro__)
    for name, field in type(subject.config).model_fields.items():
        if not field.description and f"{name}: " not in told:
            raise subject.refuse(f"the option {name!r} has no description")


def rows(subject: TrainerSubject) -> None:
    """Rows become examples with something to learn, the same ones each time, and stay as they are."""
    kept = copy.deepcopy(list(subject.rows))
    first = subject.prepared()
    if list(subject.rows) != kept:
        raise subject.refuse("it changes the rows that it is given")
    if [each.sequences for each in first] != [each.sequences for each in subject.prepared()]:
        raise subject.refuse("the same rows become other sequences the second time")
    roles = {tuple(each.role for each in example.learned.sequences) for example in first}
    if len(roles) > 1 and not subject.trainer.valued:
        raise subject.refuse(f"rows become different sequences: {sorted(roles)}; all need the same roles")


def batch(subject: TrainerSubject) -> None:
    """Scores become the batch of its family, which its loss turns into terms that fit."""
    made = subject.stepper()
    micro = next(iter(made.micro_batches([each.learned for each in subject.examples])))
    found = subject.trainer.batch(made.score(micro), subject.config)
    family = getattr(found, "family", None)
    if family is not subject.trainer.family:
        raise subject.refuse(f"`batch` returned {type(found).__name__}, no batch of {subject.trainer.family}")


def learns(subject: TrainerSubject) -> None:
    """A step has a finite loss and a finite gradient that is not zero."""
    result, gradient = subject.whole
    if result.suspects:
        raise subject.refuse(f"the loss of rows {list(result.suspects)} is not finite")
    if not gradient or not all(bool(each.isfinite().all()) for each in gradient):
        raise subject.refuse("a gradient is not finite")
    if not any(bool((each != 0).any()) for each in gradient):
        raise subject.refuse("every gradient is zero: nothing would be learned")


def cut(subject: TrainerSubject) -> None:
    """Micro-batches of any size, in any layout, have the same loss, metrics and gradient."""
    from posttrain_plugins.training.layouts import LAYOUTS

    for layout in LAYOUTS:
        for tokens in (*_BUDGETS, _PLENTY):
            found = subject.step(tokens=tokens, layout=layout)
            _require_same(subject, found, f"in micro-batches of {tokens} tokens, {layout}")


def _require_same(subject: TrainerSubject, found: tuple[StepResult, list[Tensor]], where: str) -> None:
    (expected, slopes), (result, moved) = subject.whole, found
    if abs(result.loss - expected.loss) > 1e-5 * max(1.0, abs(expected.loss)):
        raise subject.refuse(f"the loss is {result.loss} and not {expected.loss} {where}")
    for name in sorted({*expected.metrics, *result.metrics}):
        one, other = expected.metrics.get(name, 0.0), result.metrics.get(name, 0.0)
        if abs(one - other) > 1e-4 * max(1.0, abs(one)):
            raise subject.refuse(f"the metric {name!r} is {other} and not {one} {where}")
    largest = max(float(each.abs().max()) for each in slopes)
    for before, after in zip(slopes, moved, strict=True):
        error = float((before - after).abs().max())
        if error > _TOLERANCE * largest:
            raise subject.refuse(f"gradients differ by up to {error:.3g} of {largest:.3g} {where}")


def step_zero(subject: TrainerSubject) -> None:
    """What must hold before the first update does, where the model is its own reference."""
    result, _ = subject.whole
    metrics = dict(result.metrics) | ({} if result.gap is None else {"reference/gap": result.gap})
    problems = list(subject.trainer.invariants(metrics, subject.config))
    if problems:
        raise subject.refuse(f"its own invariants do not hold at step 0: {'; '.join(problems)}")


CHECKS: Mapping[str, Check[TrainerSubject]] = {
    "contract": Check(contract),
    "options": Check(options),
    "rows": Check(rows),
    "batch": Check(batch),
    "learns": Check(learns),
    "cut": Check(cut),
    "step_zero": Check(step_zero),
}
"""What must hold of every trainer on the built-in loop."""


def trainer_subject(
    trainer: str | type[Trainer],
    options: Mapping[str, Any] | None = None,
    rows: Sequence[Mapping[str, Any]] = (),
    format: str | None = None,
    files: Sequence[str | Path] = (),
) -> TrainerSubject:
    """Find a trainer by its name, or take the class itself, and give it rows.

    Raises:
        PluginError: There is no such trainer, or it breaks the contract.
        Nonconformance: The class breaks the contract, or takes no format that there are rows of.
    """
    catalogue = discover([Path(file) for file in files])
    if isinstance(trainer, str):
        label, made = trainer, catalogue.make(Group.TRAINER, trainer)
    else:
        label = getattr(trainer, "__name__", repr(trainer))
        wrong = list(faults(Group.TRAINER, trainer))
        if wrong:
            raise Nonconformance(f"{label} ({place_of(trainer)}) is no trainer: {'; '.join(wrong)}")
        made = trainer()
    chosen = format or next((each for each in ROWS if each in made.formats), None)
    if chosen is None:
        raise Nonconformance(
            f"{label}: give the suite `rows` and their `format`, one of {sorted(made.formats)}"
        )
    return TrainerSubject(label, made, dict(options or {}), rows or ROWS[chosen](7), chosen, catalogue)


def trainer_conformance(
    trainer: str | type[Trainer],
    options: Mapping[str, Any] | None = None,
    *,
    rows: Sequence[Mapping[str, Any]] = (),
    format: str | None = None,
    except_: Mapping[str, str] | None = None,
    files: Sequence[str | Path] = (),
) -> type:
    """Return the conformance suite of a trainer on the built-in loop as a class of tests.

    Args:
        trainer: The name it is registered by, or the class, which need not be registered.
        options: Its options, its loss among them; the defaults where left out.
        rows: Rows of its domain, a handful of short ones; some of the format by default.
        format: The format of the rows; the first canonical one that it takes, by default.
        except_: Checks that it is known not to pass, each with the reason. One that passes all the same fails.
        files: Local plugin files in which the name may be.

    Raises:
        SpecError: `except_` names no check, or gives no reason.
    """
    return suite(CHECKS, lambda: trainer_subject(trainer, options, rows, format, files), except_)
