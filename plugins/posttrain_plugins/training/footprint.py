"""The memory that a training takes, from above: as if every token of a full micro-batch were supervised. Light."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Self

from posttrain.artifacts.kinds import Kind, PolicyFacts
from posttrain.contracts.backend import Split
from posttrain.contracts.stage import Estimate, Input
from posttrain.registry.fields import BoundChoice
from posttrain_plugins.training.optimizers import OPTIMIZERS
from posttrain_plugins.training.options import TrainingOptions, held_positions
from posttrain_plugins.training.peft_options import adapter_size

if TYPE_CHECKING:
    from posttrain_plugins.training.offline import OfflineTrainer

FLOAT = 4
"""Bytes of a float32: weights, gradients and each of Adam's two moments."""
ACTIVATIONS = 17
"""Floats a layer keeps for its backward pass, by token and unit of width (Korthikanti et al. 2022, eq. 2)."""
TYPICAL = 1024
"""Tokens of a long sequence, where neither the options nor the model bound it."""


@dataclass(frozen=True)
class Footprint:
    """What the memory of one rank depends on.

    Args:
        trainer: Says how many sequences an example has, what is trained, and whether it reads a vocabulary.
        config: Its options.
        device: `cpu` or `cuda`.
        parameters: Weights of the model.
        layers: Its layers.
        width: Its hidden size.
        embeddings: Rows of its embedding.
        context: The longest sequence that it takes, if that is known.
        ranks: How many ranks there are.
        split: What is split over them.
    """

    trainer: OfflineTrainer
    config: TrainingOptions
    device: str
    parameters: int
    layers: int
    width: int
    embeddings: int
    context: int | None
    ranks: int = 1
    split: frozenset[Split] = frozenset()

    @classmethod
    def of(cls, trainer: OfflineTrainer, config: TrainingOptions, source: Input, device: str) -> Self | None:
        """Return that of a training that starts from a model; None for an adapter, or where too little is known."""
        facts: PolicyFacts = source.facts
        if source.kind is Kind.ADAPTER or facts.base is not None:
            return None
        shape = (facts.parameters, facts.layers, facts.width, facts.embeddings)
        if None in shape:
            return None
        parameters, layers, width, embeddings = (int(size or 0) for size in shape)
        if trainer.valued and source.kind is Kind.MODEL and (facts.shape or {}).get(_TIED) is False:
            # The head that is replaced has weights of its own.
            parameters -= embeddings * width
        ranks, split = _sharing(config)
        return cls(
            trainer, config, device, parameters, layers, width, embeddings, facts.context, ranks, split
        )

    @property
    def trainable(self) -> int:
        """Weights that are trained, those of a fresh adapter included."""
        if self.config.adapter is not None:
            return adapter_size(self.config.adapter, self.layers, self.width, self.embeddings)
        return self.trainer.trained(self.config, self.parameters, self.width)

    def estimate(self) -> Estimate:
        """Return the estimate of a rank."""
        tokens, longest, bound = self._micro_batch()
        weights, beside = self._weights(), self._activations(tokens) + self._logits(tokens, longest)
        shared = (
            self._own(weights, Split.WEIGHTS)
            + self._own(self.trainable * FLOAT, Split.GRADIENTS)
            + self._own(self._state() * FLOAT, Split.OPTIMIZER)
        )
        if Split.WEIGHTS in self.split:
            # One layer after the other is gathered.
            shared += weights // max(1, self.layers)
        own = shared + (self.config.copies * self.trainable + beside) * FLOAT
        each = " a rank" if self.ranks > 1 else ""
        return Estimate(
            parameters=self.parameters,
            trainable=self.trainable,
            memory_bytes=own if self.device == "cuda" and Split.OPENED in self.split else max(weights, own),
            note=f"{bound}{each}, with micro-batches of {tokens} tokens",
        )

    def _own(self, size: int, part: Split) -> int:
        return ceil(size / self.ranks) if part in self.split else size

    def _weights(self) -> int:
        """Bytes of the weights."""
        if self.config.quantization is None:
            return self.parameters * FLOAT
        return _quantized(self.parameters, 2 * self.embeddings * self.width, self.config.quantization.bits)

    def _state(self) -> int:
        """Floats that the optimizer keeps."""
        whole = self.config.adapter is None
        inside = min(self.trainable, self.embeddings * self.width) if whole else 0
        momentum = self.trainable if self.config.optim_args.get("momentum") else 0
        return OPTIMIZERS[self.config.optim].floats(self.trainable, inside) + momentum

    def _activations(self, tokens: int) -> int:
        """Floats that are kept for the backward pass, which does not go below the lowest weights that are trained."""
        deep = self.config.adapter is not None or self.trainable == self.parameters
        kept = 0 if not deep else 1 if self.config.gradient_checkpointing else ACTIVATIONS
        return tokens * self.width * (self.layers * kept + ACTIVATIONS)

    def _logits(self, tokens: int, longest: int) -> int:
        """Floats of the logits that are held at once and of their gradient; a head for numbers has none."""
        if self.trainer.valued:
            return 0
        # An example stays whole, however many logits it has.
        held = max(held_positions(self.device, self.embeddings), self.trainer.sequences * longest)
        return 2 * min(tokens, held) * self.embeddings

    def _micro_batch(self) -> tuple[int, int, str]:
        """Return tokens of a micro-batch and of its longest sequence, and whether these are bounds.

        What `auto` will measure is not known: at least one example has to fit.
        """
        sequences, budget = self.trainer.sequences, self.config.budget(self.device)
        if budget is None:
            longest = self.config.max_length or self.context or TYPICAL
            return sequences * longest, longest, "at least"
        longest = self.config.max_length or self.context or budget
        examples = ceil(self.config.batch_size / self.ranks)
        return min(budget, examples * sequences * longest), longest, "at most"


_TIED = "tie_word_embeddings"


def _sharing(config: TrainingOptions) -> tuple[int, frozenset[Split]]:
    """Return how many ranks there are and what is split over them; one rank, where the backend is not known."""
    chosen = config.backend
    if not isinstance(chosen, BoundChoice) or chosen.plugin is None:
        return 1, frozenset()
    backend = chosen.plugin()
    return backend.ranks(chosen.config), backend.split(chosen.config)


def _quantized(parameters: int, kept: int, bits: int) -> int:
    """Bytes of weights in few bits with a scale for each 64 or more; embeddings and head, `kept`, stay as they are."""
    kept = min(parameters, kept)
    return (parameters - kept) * (2 * bits + 1) // 16 + kept * FLOAT
