"""A transformers callback that times every step of a Trainer from outside, whoever made the Trainer."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import torch
import transformers.trainer
from gates import Gate, memory


class Steps(transformers.TrainerCallback):
    """Times a step from the end of the one before it: fetching rows, logging and callbacks are in it.

    Args:
        gate: Tells when to go on.
        gradient: Where the first step's gradient goes, as the optimizer sees it; None: nowhere.
        since: When the side began, for its start-up time.
    """

    def __init__(self, gate: Gate, gradient: Path | None, since: float) -> None:
        self.gate, self.gradient, self.since = gate, gradient, since

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        same_adapters(rest["model"])
        self.gate.tell(setup=time.perf_counter() - self.since)
        self.gate.wait("step")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if state.global_step == 0 and self.gradient is not None:
            save_gradient(rest["model"], self.gradient)

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.gate.done()
        if state.global_step < state.max_steps:
            self.gate.wait("step")

    def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.gate.tell(peak=memory("VmHWM"))


def watch(gate: Gate, since: float) -> None:
    """Put the callback into every Trainer that is made from here on."""
    gradient = gate.job.get("gradient")
    steps = Steps(gate, gradient and Path(gradient), since)
    transformers.trainer.DEFAULT_CALLBACKS.append(steps)


def same_adapters(model: torch.nn.Module) -> None:
    """Start adapters from values that depend on their names alone, so that all sides start alike."""
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            seed = int.from_bytes(hashlib.sha256(_plain(name).encode()).digest()[:6], "big")
            drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            parameter.data.copy_(drawn / parameter.shape[-1] ** 0.5)


def save_gradient(model: torch.nn.Module, path: Path) -> None:
    """Write the gradient of every parameter that has one."""
    from safetensors.torch import save_file

    found = {_plain(name): p.grad for name, p in model.named_parameters() if p.grad is not None}
    save_file({name: grad.detach().contiguous() for name, grad in found.items()}, path)


def _plain(name: str) -> str:
    return name.removeprefix("module.")
