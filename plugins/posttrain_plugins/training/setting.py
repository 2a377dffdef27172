"""What surrounds a training: dropout, determinism, the arguments that transformers gets."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.utils.deterministic as switches
import transformers

from posttrain.errors import StageError
from posttrain_plugins.training.options import TrainingOptions
from posttrain_plugins.training.randomness import random_state, restore_random_state
from posttrain_plugins.training.schedules import FITTED


@contextmanager
def without_dropout(model: torch.nn.Module) -> Iterator[None]:
    """Turn every dropout off, in modules, in their attributes and in the config, and put it back afterwards.

    Evaluation mode would do that too, but it also turns gradient checkpointing off.
    """
    configs = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None))
    }
    changed = _dropouts([*model.modules(), *configs.values()])
    try:
        for owner, name, value in changed:
            setattr(owner, name, type(value)(0))
        yield
    finally:
        for owner, name, value in changed:
            setattr(owner, name, value)


def drops(model: torch.nn.Module) -> bool:
    """Whether something is dropped at random while the model trains."""
    return any(value > 0 for _, _, value in _dropouts(model.modules()))


def _dropouts(owners: Iterable[Any]) -> list[tuple[Any, str, float]]:
    """Return every probability of dropping something: its owner, the attribute and the value."""
    found: list[tuple[Any, str, float]] = []
    for owner in owners:
        names = ["p"] if isinstance(owner, torch.nn.modules.dropout._DropoutNd) else _dropout_names(owner)
        found.extend((owner, name, getattr(owner, name)) for name in names)
    return found


def _dropout_names(owner: Any) -> list[str]:
    """Return the attributes that hold a probability of dropping units or layers."""
    named = (name for name in vars(owner) if "drop" in name and not name.startswith("_"))
    return [name for name in named if isinstance(getattr(owner, name), float)]


@contextmanager
def deterministic(seed: int) -> Iterator[None]:
    """Seed everything; on a CPU ask torch for deterministic kernels. Leave generators and switches as they were."""
    generators = random_state()
    before = torch.are_deterministic_algorithms_enabled(), switches.fill_uninitialized_memory  # type: ignore[attr-defined]
    transformers.set_seed(seed)
    if not torch.cuda.is_available():
        torch.use_deterministic_algorithms(True)
        switches.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        restore_random_state(generators)
        torch.use_deterministic_algorithms(before[0])
        switches.fill_uninitialized_memory = before[1]  # type: ignore[attr-defined]


@contextmanager
def same_config(model: Any) -> Iterator[None]:
    """Put back what transformers' Trainer changes in the model's config, so that it is saved as it came."""
    # Models that see have it in the config of their text model alone.
    before = {name: value for name, value in vars(model.config).items() if name == "use_cache"}
    try:
        yield
    finally:
        vars(model.config).pop("use_cache", None)
        vars(model.config).update(before)


def arguments(config: TrainingOptions, steps: int, directory: Path) -> transformers.TrainingArguments:
    """Translate the options; nothing is reported outside the process.

    Raises:
        StageError: The schedule does not fit the number of steps.
    """
    # It would warn that the ranks were not started in a way that it knows.
    logging.getLogger("transformers.training_args").setLevel(logging.ERROR)
    made = transformers.TrainingArguments(
        output_dir=str(directory),
        max_steps=steps,
        per_device_train_batch_size=config.batch_size,
        learning_rate=config.learning_rate,
        lr_scheduler_type=config.lr_scheduler_type,
        lr_scheduler_kwargs=dict(config.lr_scheduler_kwargs),
        warmup_steps=config.warmup_steps,
        optim=config.optim,
        optim_args=",".join(f"{name}={value}" for name, value in config.optim_args.items()) or None,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_epsilon=config.adam_epsilon,
        max_grad_norm=config.max_grad_norm,
        activation_checkpointing=config.gradient_checkpointing,
        # The other kind gives no gradient to adapters on frozen embeddings.
        activation_checkpointing_kwargs={"use_reentrant": False},
        seed=config.seed,
        logging_steps=config.logging_steps,
        logging_nan_inf_filter=False,
        save_strategy="steps" if config.save_steps else "no",
        save_steps=config.save_steps or 1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    made._n_gpu = min(made.n_gpu, 1)
    _require_fit(config, made.get_warmup_steps(steps), steps)
    return made


def _require_fit(config: TrainingOptions, warmup: int, steps: int) -> None:
    """Refuse a warm-up and a decay that are longer than the training: transformers would cut or crash."""
    if config.lr_scheduler_type not in FITTED:
        return
    decay = int(config.lr_scheduler_kwargs.get("num_decay_steps", 1))
    if warmup + decay > steps:
        raise StageError(
            f"the schedule {config.lr_scheduler_type} does not fit the training",
            where="lr_scheduler_type",
            found=f"{warmup} steps of warm-up and at least {decay} of decay",
            expected=f"at most {steps} steps together",
            fix="lower warmup_steps or num_decay_steps, or train longer",
        )
