"""What surrounds a training: adapters, dropout, determinism, the arguments that transformers gets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.utils.deterministic as switches
import transformers

from posttrain.errors import StageError
from posttrain_plugins.training.options import Lora, TrainingOptions
from posttrain_plugins.training.randomness import random_state, restore_random_state


def with_adapter(model: Any, lora: Lora) -> Any:
    """Put a fresh adapter on a model; the model itself is frozen.

    Raises:
        StageError: No module has one of the target names.
    """
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
    )
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise StageError(
            "the adapter does not fit the model",
            where="lora.target_modules",
            found=str(error),
            fix="name modules that the model has, or `all-linear`",
        ) from error


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
    use_cache = model.config.use_cache
    try:
        yield
    finally:
        model.config.use_cache = use_cache


def arguments(config: TrainingOptions, steps: int, directory: Path) -> transformers.TrainingArguments:
    """Translate the options; nothing is reported outside the process."""
    made = transformers.TrainingArguments(
        output_dir=str(directory),
        max_steps=steps,
        per_device_train_batch_size=config.batch_size,
        learning_rate=config.learning_rate,
        lr_scheduler_type=config.lr_scheduler_type,
        warmup_steps=config.warmup_steps,
        optim=config.optim,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_epsilon=config.adam_epsilon,
        max_grad_norm=config.max_grad_norm,
        activation_checkpointing=config.gradient_checkpointing,
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
    return made
