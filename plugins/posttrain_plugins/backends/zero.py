"""DeepSpeed's ZeRO: optimizer state (1), gradients too (2), parameters too (3) are split over the ranks.

DeepSpeed computes and keeps the optimizer's state; the loop drives it, and the checkpoints are the loop's, so
nothing is ever pickled.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from posttrain.contracts.backend import Place
from posttrain.contracts.component import Config
from posttrain.execution.environment import variables
from posttrain_plugins.backends.group import Group
from posttrain_plugins.backends.weights import copy_into, ordinary

# Left to find out by itself, DeepSpeed warns where there is no GPU.
with variables({"DS_ACCELERATOR": "cuda" if torch.cuda.is_available() else "cpu"}):
    import deepspeed
    from deepspeed.runtime.utils import combine_grad_norm_groups


class Zero(Group):
    """A DeepSpeed engine of stage 1, 2 or 3.

    Args:
        place: Where this rank stands.
        config: The backend's options.
    """

    def __init__(self, place: Place, config: Config) -> None:
        super().__init__(place, config)
        self.engine: Any = None
        self.layout = f"ZeRO-{self.stage}"
        self._stack = ExitStack()
        self._stack.enter_context(warnings.catch_warnings())
        # DeepSpeed calls some of torch's collectives by their old names.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
        # It would compile an operator of its own for CPUs; gloo does as well.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.utils.logger.setLevel(logging.WARNING)
        with variables({"LOCAL_RANK": "0"}):
            deepspeed.init_distributed(self._talk, auto_mpi_discovery=False, verbose=False)

    @property
    def _talk(self) -> str:
        return "nccl" if self.device.type == "cuda" else "gloo"

    def wrap(self, model: Any, optimizer: Any, precision: Any = None) -> tuple[Any, Any]:
        """Hand both over to an engine."""
        # DeepSpeed looks for its number among the GPUs of this process, which sees one, in every forward pass.
        self._stack.enter_context(variables({"LOCAL_RANK": "0"}))
        optimizer.param_groups = [group for group in optimizer.param_groups if group["params"]]
        self.engine, _, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=self._settings(precision)
        )
        return self.engine, EngineOptimizer(self.engine)

    def backward(self, loss: Tensor, last: bool) -> None:
        """Let the engine back-propagate and reduce as its stage does; before `wrap` there is none."""
        if self.engine is None:
            loss.backward()
            return
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss, scale_wrt_gas=False)

    def clip(self, model: Any, limit: float) -> float:
        """Return the norm; the engine clips when it steps."""
        zero = self.engine.optimizer
        scaled = (
            combine_grad_norm_groups(zero._get_norm_groups())
            if self.stage == 3
            else zero.scaled_global_norm()
        )
        norm = float(scaled) / float(zero.loss_scale)
        # DeepSpeed's mark of a gradient that is not finite.
        norm = norm if norm >= 0 else math.nan
        zero.clip_grad = limit if math.isfinite(limit) else 0.0
        return norm

    def weights(self, model: Any, trainable: bool = False) -> Mapping[str, Tensor]:
        """Gather one tensor after the other."""
        return ordinary(model, trainable, _whole, keep=self.rank == 0)

    def load(self, model: Any, weights: Mapping[str, Tensor]) -> None:
        """Copy into the model: before an engine has it, or after its last step."""
        copy_into(model, weights, _put)

    def state(self, optimizer: Any) -> Any:
        """Return the state of this rank's partitions. Their weights are in the model's, in the same precision."""
        return self._inner(lambda inner: inner.state_dict())

    def restore(self, optimizer: Any, state: Any) -> None:
        """Put the partitions' state back."""
        self._inner(lambda inner: inner.load_state_dict(state))

    def close(self) -> None:
        """Take the hooks off the model and leave the group."""
        if self.engine is not None:
            self.engine.destroy()
        self._stack.close()
        super().close()

    @property
    def stage(self) -> int:
        """1, 2 or 3."""
        return int(self.config.stage)  # type: ignore[attr-defined]

    def _inner(self, use: Any) -> Any:
        """Use the optimizer that holds the partitions; stage 3 gives them to it for a step at a time."""
        zero = self.engine.optimizer
        if self.stage < 3:
            return use(zero.optimizer)
        zero._set_fp32_optimizer_param_groups()
        try:
            return use(zero.optimizer)
        finally:
            zero._clear_fp32_optimizer_param_groups()

    def _settings(self, precision: torch.dtype | None) -> dict[str, Any]:
        settings: dict[str, Any] = {
            # DeepSpeed wants these numbers; the loop's own cut is what counts.
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "zero_allow_untested_optimizer": True,
            "steps_per_print": None,
            "zero_optimization": {
                "stage": self.stage,
                "overlap_comm": False,
                "contiguous_gradients": True,
                "stage3_param_persistence_threshold": self.config.persistence_threshold,  # type: ignore[attr-defined]
            },
        }
        if precision is not None:
            settings["torch_autocast"] = {
                "enabled": True,
                "dtype": str(precision).removeprefix("torch."),
                # Gradients travel in the precision of the weights.
                "lower_precision_safe_modules": [],
            }
        return settings


class EngineOptimizer(torch.optim.Optimizer):
    """What schedulers and the loop see of the engine's optimizer: its groups, and one step at a time."""

    _is_accelerate_prepared = True
    """accelerate leaves it alone."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the optimizer that the engine steps."""
        groups: list[dict[str, Any]] = self.engine.optimizer.param_groups
        return groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Its defaults."""
        return dict(self.engine.optimizer.optimizer.defaults)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was left out because the gradient was not finite."""
        return bool(self.engine.optimizer.overflow)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take the step, clipped, and forget the gradient."""
        self.engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradient."""
        self.engine.optimizer.zero_grad(set_to_none)


def _whole(tensor: Tensor) -> Tensor:
    if not hasattr(tensor, "ds_id"):
        return tensor
    with deepspeed.zero.GatheredParameters([tensor]):
        return tensor.detach().clone()


def _put(tensor: Tensor, value: Tensor) -> None:
    if not hasattr(tensor, "ds_id"):
        tensor.copy_(value)
        return
    with deepspeed.zero.GatheredParameters([tensor], modifier_rank=0):
        tensor.copy_(value)
