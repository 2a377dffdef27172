"""The mean of the weights at the last steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from posttrain.contracts.callback import Callback, Training
from posttrain.contracts.component import Config
from posttrain_plugins.callbacks.averages import copied, replaced

if TYPE_CHECKING:
    from torch import Tensor


class MergeCheckpointsOptions(Config):
    """Options of the callback `merge_checkpoints`."""

    last: int = Field(
        default=3, ge=2, description="how many weights to average, those of the last step among them"
    )
    every: int = Field(
        ge=1,
        description="steps between two of them; `save_steps` has nothing to do with it, as it changes no result",
    )


class MergeCheckpoints(Callback):
    """Put out the mean of the weights at the last multiples of `every` and at the last step.

    Averages of points of one trajectory: Izmailov et al. 2018 (https://arxiv.org/abs/1803.05407), with equal weights.
    The weights wait in files, so they cost no memory. Where fewer have been reached, there are fewer in the mean.
    """

    config = MergeCheckpointsOptions
    target = "posttrain_plugins.callbacks.merge_checkpoints:Merging"

    def problems(self, config: MergeCheckpointsOptions, training: Any) -> Sequence[str]:
        """What is put out cannot be both the mean and the weights of the best evaluation."""
        if training.load_best_model_at_end:
            return ("load_best_model_at_end puts out other weights; leave one of them out",)
        return ()


class Merging:
    """Keeps weights in files of rank 0.

    Args:
        training: The training.
        config: The options.
    """

    def __init__(self, training: Training, config: MergeCheckpointsOptions) -> None:
        self.training, self.config = training, config
        self.step = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Keep the weights of a step that is due. A training that was broken off writes the same files again."""
        self.step = state.global_step
        if self.step % self.config.every:
            return
        weights = self.training.weights()
        if self.training.parallel.rank == 0:
            self._keep(weights)

    def conclude(self, weights: Mapping[str, Tensor]) -> Mapping[str, Mapping[str, Tensor]]:
        """Average the last weights with those before them, in float64."""
        from safetensors.torch import load_file

        total = {
            name: tensor.double() for name, tensor in copied(weights).items() if tensor.is_floating_point()
        }
        earlier = [step for step in self._steps() if step < self.step][1 - self.config.last :]
        for step in earlier:
            kept = load_file(self._file(step))
            for name, sum in total.items():
                sum.add_(kept.get(name, weights[name]))
        count = len(earlier) + 1
        steps = ", ".join(map(str, [*earlier, self.step]))
        self.training.context.note(f"the weights after the steps {steps} are averaged")
        return {"model": replaced(weights, {name: sum / count for name, sum in total.items()})}

    def state(self) -> int:
        """Return the step that was reached."""
        return self.step

    def restore(self, state: int) -> None:
        """Go on from a checkpoint."""
        self.step = state

    def _keep(self, weights: Mapping[str, Tensor]) -> None:
        from safetensors.torch import save_file

        self.training.work.mkdir(parents=True, exist_ok=True)
        part = self.training.work / "part"
        save_file(copied(weights), part)
        part.replace(self._file(self.step))
        for old in [step for step in self._steps() if step <= self.step][: -self.config.last]:
            self._file(old).unlink()

    def _steps(self) -> list[int]:
        """Return the steps of which there are weights, in order."""
        return sorted(int(file.stem) for file in self.training.work.glob("*.safetensors"))

    def _file(self, step: int) -> Path:
        return self.training.work / f"{step}.safetensors"
