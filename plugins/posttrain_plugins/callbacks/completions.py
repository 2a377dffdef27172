"""Sampled completions while the policy is trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Self

from pydantic import Field, model_validator

from posttrain.contracts.callback import Callback, Training
from posttrain.contracts.component import Config
from posttrain.errors import StageError

TABLE = "completions"
_SHOWN = 200
"""Characters of a completion that a note shows."""


class CompletionsOptions(Config):
    """Options of the callback `completions`."""

    every: int = Field(default=100, ge=1, description="steps between two samples, the last step beside")
    on_start: bool = Field(default=False, description="sample before the first step too")
    prompts: tuple[str, ...] = Field(
        default=(),
        description="what to ask, each as one user turn where there is a chat template; where none is given, what the "
        "dataset's first rows ask",
    )
    rows: int = Field(
        default=4,
        ge=1,
        description="rows whose prompts are taken, of port `eval` where it is connected, else of `data`",
    )
    max_new_tokens: int = Field(default=64, ge=1, description="longest completion")
    temperature: float = Field(default=0.0, ge=0, description="0: the likeliest token each time")
    top_p: float = Field(default=1.0, gt=0, le=1, description="share of the probability to sample from")
    seed: int = Field(default=0, ge=0, description="seed of the samples")
    notes: bool = Field(default=True, description="say them as notes, beside the table that trackers show")

    @model_validator(mode="after")
    def _nothing_ignored(self) -> Self:
        if self.prompts and "rows" in self.model_fields_set and self.rows != 4:
            raise ValueError("rows would be ignored beside prompts")
        if self.temperature == 0 and (self.top_p != 1 or self.seed != 0):
            raise ValueError("top_p and seed would be ignored with temperature 0")
        return self


class Completions(Callback):
    """Show what the policy answers to the same prompts, every `every` steps.

    The answers are notes in the terminal, and a table `completions` in MLflow. Dropout is off and the random generators
    are put back, so the training is the same with and without it, to the bit.
    """

    config = CompletionsOptions
    target = "posttrain_plugins.callbacks.completions:Sampler"
    watches_only = True


class Sampler:
    """Generates on every rank, as each may hold a part of the policy, and tells on the first.

    Args:
        training: The training.
        config: The options.
    """

    def __init__(self, training: Training, config: CompletionsOptions) -> None:
        self.training, self.config = training, config
        if getattr(training.context.stage, "valued", False):
            raise StageError(
                "a model that gives numbers has no answers to show",
                where="callback completions",
                fix="leave the callback out of trainings of such models",
            )
        self.asked = [(prompt, _turn(training, prompt)) for prompt in config.prompts] or list(
            islice(_questions(training), config.rows)
        )
        self.prompts = [training.policy.encoder.encode_prompt(prompt) for _, prompt in self.asked]
        self.sampled = -1

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Sample before the first step, if that is asked for."""
        if state.global_step == 0 and self.config.on_start:
            self._sample(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Sample where it is due."""
        step = state.global_step
        if step % self.config.every == 0:
            self._sample(step)

    def last_step(self, step: int) -> None:
        """Sample from what was trained, if that is not done."""
        if self.sampled != step:
            self._sample(step)

    def _sample(self, step: int) -> None:
        from posttrain_plugins.rollouts.generation import generate

        config, self.sampled = self.config, step
        with self.training.aside():
            found = generate(
                self.training.policy,
                self.prompts,
                max_new_tokens=config.max_new_tokens,
                temperature=config.temperature,
                top_p=config.top_p,
                seed=config.seed,
            )
        decode = self.training.policy.encoder.decode
        rows = [
            {
                "prompt": shown,
                "completion": decode(one.tokens),
                "tokens": len(one.tokens),
                "finished": one.finished,
            }
            for (shown, _), (one, *_) in zip(self.asked, found, strict=True)
        ]
        self.training.context.table(TABLE, step, rows)
        if config.notes:
            self.training.context.note("\n".join(_told(step, rows)))


def _told(step: int, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield f"completions after step {step}"
    for row in rows:
        yield f"  {_short(row['prompt'])} → {_short(row['completion'])}{'' if row['finished'] else ' …'}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else f"{line[: _SHOWN - 1]}…"


def _questions(training: Training) -> Iterator[tuple[str, Any]]:
    """Yield prompts of the dataset, each with how it is shown.

    Raises:
        StageError: Its rows have none.
    """
    from posttrain_plugins.data.rows import ROWS, stream_rows

    artifact = next(iter((*training.context.inputs.get("eval", ()), *training.context.inputs["data"])))
    for row in stream_rows(artifact) if artifact.file(ROWS).exists() else [{}]:
        prompt = _prompt(row)
        if prompt is None:
            raise StageError(
                "the rows have no prompts to sample from",
                where="callback completions",
                found=", ".join(row) or "tokens",
                expected="a column `prompt` or `messages`",
                fix="give `prompts`",
            )
        yield _text(prompt), prompt


def _turn(training: Training, prompt: str) -> Any:
    return [{"role": "user", "content": prompt}] if training.policy.encoder.has_template else prompt


def _prompt(row: Mapping[str, Any]) -> Any:
    """Return the prompt of a row: its own, or what comes before the last answer of a conversation."""
    if "prompt" in row:
        return row["prompt"]
    messages = row.get("messages") or ()
    last = max((index for index, each in enumerate(messages) if each["role"] == "assistant"), default=None)
    return messages[:last] if last else None


def _text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else str(prompt[-1].get("content") or "")
