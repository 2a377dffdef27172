"""posttrain's side by itself, telling what its steps hold and what they spend their time on."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
import transformers.trainer
from gates import Gate, memory
from posttrain_side import context
from results import SETTLED, TIMED, WATCHED
from torch.profiler import ProfilerActivity, profile

from posttrain.contracts.registration import load_target
from posttrain_plugins.training.step import Stepper

PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm")


class _Heap(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "free", "small", "maps", "mapped", "x", "y", "used", "unused", "top")
    ]


@cache
def _mallinfo() -> Callable[[], _Heap]:
    told: Any = ctypes.CDLL(None).mallinfo2
    told.restype = _Heap
    return told


def in_use() -> int:
    """Return the bytes of all blocks that glibc (2.33 at least) has given out."""
    heap = _mallinfo()()
    return int(heap.used + heap.mapped)


@dataclass
class Peak:
    """What a process held when it held most, in bytes; the parts come to `resident`.

    Args:
        weights: Of the model.
        moments: Of the optimizer.
        gradients: Of the micro-batches before this one.
        kept: By the forward pass, for the backward pass.
        other: In use besides: tokenizer, rows, kernels.
        backward: Beyond all this, in the backward pass: gradients and temporary blocks.
        spare: Freed blocks that the process keeps, and pages of libraries.
        resident: In memory, less that after the imports.
    """

    weights: int
    moments: int
    gradients: int
    kept: int
    other: int
    backward: int
    spare: int
    resident: int


class Memory:
    """Follows what is in use and resident through forward and backward passes.

    Args:
        gate: Tells the most that there was.
    """

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.peak: Peak | None = None
        self.blocks, self.pages = in_use(), memory("VmRSS")
        self.moments = self.gradients = self.used = self.resident = 0
        self.watching, self.lock = True, threading.Lock()
        sys.setswitchinterval(5e-4)
        self.thread = threading.Thread(target=self._sample, daemon=True)
        self.thread.start()

    def _sample(self) -> None:
        while self.watching:
            self.look()
            time.sleep(5e-4)

    def look(self) -> None:
        """Take note of what there is now."""
        with self.lock:
            self.used, self.resident = max(self.used, in_use()), max(self.resident, memory("VmRSS"))

    def begin(self, model: torch.nn.Module) -> int:
        """Start over with a micro-batch; return what is in use."""
        self.gradients = _bytes(each.grad for each in model.parameters() if each.grad is not None)
        with self.lock:
            self.used = self.resident = 0
        return in_use()

    def passed(self, model: torch.nn.Module, before: int, after: int) -> None:
        """Take a micro-batch in, whose backward pass is over.

        Args:
            model: The policy.
            before: In use before its forward pass.
            after: In use after it.
        """
        self.look()
        used = max(self.used, after)
        weights = _bytes(model.parameters())
        found = Peak(
            weights=weights,
            moments=self.moments,
            gradients=self.gradients,
            kept=after - before,
            other=before - self.blocks - self.moments - self.gradients,
            backward=used - after,
            spare=self.resident - self.pages - (used - self.blocks) - weights,
            resident=self.resident - self.pages,
        )
        if self.peak is None or found.resident > self.peak.resident:
            self.peak = found

    def stop(self) -> None:
        """Look no more, and tell."""
        self.watching = False
        self.thread.join()
        assert self.peak is not None, "a step has micro-batches"
        self.gate.tell(memory=asdict(self.peak))


def _bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _moments(optimizer: Any) -> int:
    plain = getattr(optimizer, "optimizer", optimizer)
    return _bytes(each for state in plain.state.values() for each in state.values() if torch.is_tensor(each))


class Watcher(transformers.TrainerCallback):
    """Watches memory in the first steps and time in later ones.

    Args:
        gate: Tells both.
        vocabulary: Size of the head.
    """

    def __init__(self, gate: Gate, vocabulary: int) -> None:
        self.gate, self.vocabulary = gate, vocabulary
        self.memory: Memory | None = None
        self.profile: Any = None
        self.began = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        assert self.memory is not None
        self.memory.moments = _moments(rest["optimizer"])
        if state.global_step == WATCHED:
            self.memory.stop()
        if state.global_step == SETTLED:
            self.profile = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
            self.profile.__enter__()
            self.began = time.perf_counter()
        if state.global_step == SETTLED + TIMED:
            seconds = time.perf_counter() - self.began
            self.profile.__exit__(None, None, None)
            events = self.profile.key_averages(group_by_input_shape=True)
            self.gate.tell(time=shares(events, seconds, self.vocabulary))


def shares(events: Any, seconds: float, vocabulary: int) -> dict[str, float]:
    """Return which part of some seconds went where."""
    spent: dict[str, float] = {
        "products of the head": 0.0,
        "other products": 0.0,
        "attention": 0.0,
        "optimizer": 0.0,
    }
    for event in events:
        if (kind := _kind(event, vocabulary)) is not None:
            spent[kind] += event.self_cpu_time_total / 1e6 / seconds
    return {**spent, "the rest": 1 - sum(spent.values())}


def _kind(event: Any, vocabulary: int) -> str | None:
    if event.key in PRODUCTS:
        head = any(vocabulary in shape for shape in event.input_shapes)
        return "products of the head" if head else "other products"
    if event.key.startswith("aten::_scaled_dot_product"):
        return "attention"
    return "optimizer" if event.key.startswith("aten::_fused_adam") else None


def follow(watcher: Watcher) -> None:
    """Tell the watcher of every micro-batch."""
    score, backward = Stepper._scored, Stepper._backward
    seen: dict[str, int] = {}

    def scored(self: Stepper, part: Any) -> Any:
        assert watcher.memory is not None
        seen["before"] = watcher.memory.begin(self.model)
        result = score(self, part)
        seen["after"] = in_use()
        return result

    def passed(self: Stepper, share: Any, last: bool) -> None:
        backward(self, share, last)
        assert watcher.memory is not None
        watcher.memory.passed(self.model, seen["before"], seen["after"])

    Stepper._scored, Stepper._backward = scored, passed  # type: ignore[method-assign]


def vocabulary_of(job: Mapping[str, Any]) -> int:
    """Return the size of the head of a job's model."""
    return int(transformers.AutoConfig.from_pretrained(job["model"]).vocab_size)


def main() -> None:
    """Run the stage."""
    gate = Gate()
    torch.set_num_threads(gate.job["threads"])
    made = context(gate.job)
    target = load_target(made.stage.target)
    watcher = Watcher(gate, vocabulary_of(gate.job))
    follow(watcher)
    transformers.trainer.DEFAULT_CALLBACKS.append(watcher)
    watcher.memory = Memory(gate)
    target(made)


if __name__ == "__main__":
    main()
