"""Trainings of models that give numbers: what they start from, and what they put out, tried again as it was saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from torch import Tensor

from posttrain.artifacts.kinds import PolicyFacts, ScoreFacts
from posttrain.artifacts.manifest import Artifact, Manifest
from posttrain.contracts.stage import StageContext
from posttrain.contracts.trainer import Example, StepEnds
from posttrain.errors import StageError
from posttrain_plugins.evaluation.rewards import values_of
from posttrain_plugins.models.heads import FORMS
from posttrain_plugins.models.policy import Policy, usable_device
from posttrain_plugins.models.valued import numbers, open_valued, save_valued
from posttrain_plugins.models.valued_record import Probe, write_record
from posttrain_plugins.stopping import pauses
from posttrain_plugins.trainers.valued import ValuedTrainer
from posttrain_plugins.training.adapters import Adapted
from posttrain_plugins.training.head.value import value_parts
from posttrain_plugins.training.options import EVALUATION

if TYPE_CHECKING:
    from posttrain_plugins.training.loop import Loop

SAME = 1e-5
"""Largest difference between a number before saving and after loading, as a share of it (of 1 where it is smaller)."""
SLACK = {"float32": 0.0, "bfloat16": 0.05, "float16": 0.05}
"""By how much the accuracy may change where training computes with less precision, beside one pair that flips."""
ACCURACY = f"{EVALUATION}/accuracy"
_MODEL = "model"
"""The port that the evaluation is of; another one holds other weights."""
PROBES = 4
PROBE_TOKENS = 256
TRAINED = 512
"""Without held-out rows, so many of the trained ones are judged."""


def open_trained(context: StageContext, device: str) -> Policy:
    """Open what the training of a model that gives numbers starts from, on a device."""
    config = context.config
    policy = open_valued(
        context.input("model"),
        context,
        trainer_of(context).kind,
        seed=config.seed,
        trainable=True,
        device=device,
        quantization=config.quantization,
    )
    if config.trunk == "frozen":
        policy.model.requires_grad_(False)
        value_parts(policy.model)[1].requires_grad_(True)
    return policy


def task_of(context: StageContext) -> str:
    """Return what peft calls what the model does."""
    return FORMS[trainer_of(context).kind].task


def trainer_of(context: StageContext) -> ValuedTrainer:
    """Return the trainer of a stage.

    Raises:
        StageError: It trains a model that gives numbers and does not say of which kind.
    """
    if not isinstance(context.stage, ValuedTrainer):
        raise StageError(
            "the trainer does not say which kind of model it puts out",
            found=type(context.stage).__name__,
            expected="a subclass of `ValuedTrainer`",
        )
    return context.stage


@dataclass(frozen=True)
class Keeping:
    """Saves what a training has learned, opens it again and judges it.

    Args:
        context: The stage's.
        policy: What training started from.
        adapted: The same with its fresh adapter, if it has one.
        loop: The training, which has ended.
        figures: What it came to.
    """

    context: StageContext
    policy: Policy
    adapted: Adapted
    loop: Loop
    figures: Mapping[str, float]

    def save(self, port: str, weights: Mapping[str, Tensor]) -> Path:
        """Write a model to its output port and return where it lies; on rank 0.

        Raises:
            StageError: Opened again, it gives other numbers, or judges the held-out rows otherwise.
        """
        directory = self.context.output(port)
        facts = self._written(directory, weights)
        probes = self._probes()
        before = self._before(weights, probes)
        opened = self._opened(directory, facts)
        after = numbers(opened.model, probes)
        if before is not None:
            _require_same(before, after)
        scores = self._scores(opened.model)
        if port == _MODEL:
            self._require_same_accuracy(scores)
        # What is read in few bits is not what others would read.
        kept = [] if self.context.config.quantization is not None else zip(probes, after, strict=True)
        write_record(directory, scores, [replace(probe, values=tuple(values)) for probe, values in kept])
        self.context.describe(port, self._trainer.kind, facts.model_copy(update={"scores": scores}))
        self.context.note(told(scores, self._trainer.numbers))
        return directory

    @property
    def _trainer(self) -> ValuedTrainer:
        return trainer_of(self.context)

    @property
    def _examples(self) -> Sequence[Example]:
        """The held-out rows, or without any some of those that were trained on."""
        evaluation = self.loop.evaluation
        return self.loop.examples[:TRAINED] if evaluation is None else evaluation.examples

    def _written(self, directory: Path, weights: Mapping[str, Tensor]) -> PolicyFacts:
        base = self.policy.artifact if self.policy.base is None else self.policy.base
        return save_valued(
            directory,
            self.adapted.model,
            self.policy.artifact.path,
            base=base.digest,
            initial=self.adapted.initial,
            weights=weights,
            quantization=self.context.config.quantization,
        )

    def _probes(self) -> list[Probe]:
        shortest = sorted(self._examples, key=lambda example: example.longest)[:PROBES]
        return [probe_of(example) for example in shortest]

    def _before(self, weights: Mapping[str, Tensor], probes: Sequence[Probe]) -> list[list[float]] | None:
        """Return what the model says that is still in memory; None where it is in parts."""
        model = self.adapted.model
        if self.loop.parallel.layout:
            return None
        model.load_state_dict(dict(weights), strict=False)
        found = numbers(model, probes)
        self.loop.release()
        return found

    def _opened(self, directory: Path, facts: PolicyFacts) -> Policy:
        manifest = Manifest(kind=self._trainer.kind, facts=facts, files=())
        return open_valued(
            Artifact(manifest.digest, manifest, directory),
            self.context,
            self._trainer.kind,
            device=usable_device(),
            quantization=self.context.config.quantization,
        )

    def _scores(self, model: Any) -> ScoreFacts:
        pause = pauses(self.context, "judged rows", "training")
        values = values_of(model, self._examples, self.loop.stepper.budget.tokens, pause)
        right, judged = self._trainer.judged(self._examples, values)
        every = [value for each in values.values() for value in each]
        way = self._trainer.supervise(self.context.config)
        return ScoreFacts(
            mean=fmean(every),
            deviation=pstdev(every),
            count=len(every),
            accuracy=right / judged if judged else None,
            judged=judged,
            held_out=self.loop.evaluation is not None,
            separator=way.separator if isinstance(way, StepEnds) else None,
        )

    def _require_same_accuracy(self, scores: ScoreFacts) -> None:
        found, expected = scores.accuracy, self.figures.get(ACCURACY)
        if found is None or expected is None or not scores.judged:
            return
        if abs(found - expected) > SLACK[self.context.config.precision] + 1.5 / scores.judged:
            raise StageError(
                "the saved model judges the held-out rows otherwise than the one that was trained",
                where="opening it again",
                found=f"accuracy {found:.4f}",
                expected=f"{expected:.4f}",
            )


def probe_of(example: Example) -> Probe:
    """Return the first sequence of an example as a conversation to try a model on; of a long one, its beginning."""
    sequence = example.sequences[0]
    tokens = tuple(sequence.tokens[:PROBE_TOKENS])
    places = tuple(at for at in range(len(tokens)) if sequence.supervised[at])
    return Probe(tokens, places or (len(tokens) - 1,))


def told(scores: ScoreFacts, numbers: str) -> str:
    """Say what a model came to, whose numbers are called so."""
    text = f"{numbers} {scores.mean:.3g} ± {scores.deviation:.3g}"
    if scores.accuracy is None:
        return text
    rows = "held-out" if scores.held_out else "training"
    return f"accuracy {scores.accuracy:.3f} over {scores.judged} judgements of {rows} rows; {text}"


def _require_same(before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]) -> None:
    for one, other in zip(before, after, strict=True):
        for expected, found in zip(one, other, strict=True):
            if not abs(found - expected) <= SAME * max(1.0, abs(expected)):
                raise StageError(
                    "the saved model gives other numbers than the one that was trained",
                    where="opening it again",
                    found=f"{found:.7g}",
                    expected=f"{expected:.7g}",
                )
