"""Adapters on tiny models: made, trained for a few steps, saved and opened again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from helpers.models import as_artifact
from torch import Tensor

from posttrain.artifacts.kinds import Kind
from posttrain.artifacts.manifest import Artifact
from posttrain_plugins.models.mode import evaluating
from posttrain_plugins.models.policy import Policy, open_policy, save_policy
from posttrain_plugins.training.adapters import Adapted, with_adapter
from posttrain_plugins.training.options import TrainingOptions
from posttrain_plugins.training.peft_options import Adapter, Quantization

TOKENS = torch.randint(4, 60, (3, 9), generator=torch.Generator().manual_seed(1))

LORAS: Mapping[str, Mapping[str, Any]] = {
    "lora": {"r": 2},
    "rslora": {"r": 2, "rslora": True},
    "dora": {"r": 2, "dora": True},
    "gaussian": {"r": 2, "init": "gaussian"},
    "orthogonal": {"r": 2, "init": "orthogonal"},
    "pissa": {"r": 2, "init": "pissa"},
    "pissa fast": {"r": 2, "init": "pissa", "pissa_niter": 4},
    "pissa rslora": {"r": 2, "init": "pissa", "rslora": True},
    "pissa dora": {"r": 2, "init": "pissa", "dora": True},
    "pissa and a whole head": {"r": 2, "init": "pissa", "modules_to_save": ["lm_head"]},
    "olora": {"r": 2, "init": "olora"},
    "whole head": {"r": 2, "modules_to_save": ["lm_head"]},
    "whole embeddings": {"r": 2, "modules_to_save": ["embed_tokens"]},
    "on the head": {"r": 2, "target_modules": ["q_proj", "lm_head"]},
    "on the embeddings": {"r": 2, "target_modules": ["q_proj", "embed_tokens"]},
    "biases": {"r": 2, "bias": "all"},
    "biases of targets": {"r": 2, "bias": "lora_only"},
    "tokens": {"r": 2, "trainable_tokens": ["a", "b"]},
    "one layer": {"r": 2, "target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1]},
    "excluded": {"r": 2, "exclude_modules": ["q_proj"]},
}
OTHERS: Mapping[str, Mapping[str, Any]] = {
    "delora": {"r": 2},
    "hira": {"r": 2},
    "hra": {"r": 2},
    "ia3": {},
    "loha": {"r": 2},
    "lokr": {"r": 2},
    "miss": {"r": 2},
    "oft": {"block_size": 4},
    "vera": {"r": 4},
}
ADAPTERS: Mapping[str, Mapping[str, Any]] = {
    **{name: {"lora": options} for name, options in LORAS.items()},
    **{name: {"peft": {"method": name, **options}} for name, options in OTHERS.items()},
}
"""Trainer options of every kind of adapter that is offered."""


def adapter_of(options: Mapping[str, Any]) -> Adapter:
    """Validate trainer options and return the adapter that they ask for."""
    adapter = TrainingOptions(**options).adapter
    assert adapter is not None
    return adapter


@dataclass
class Bench:
    """One base model, and adapters on it.

    Args:
        base: The model's artifact.
    """

    base: Artifact
    known: dict[str, Artifact] = field(default_factory=dict)

    def artifact(self, digest: str) -> Artifact:
        return {self.base.digest: self.base, **self.known}[digest]

    def fresh(
        self, options: Mapping[str, Any], seed: int = 0, quantization: Quantization | None = None
    ) -> Adapted:
        """Open the base and put an adapter on it."""
        policy = open_policy(self.base, self, trainable=True, quantization=quantization)
        torch.manual_seed(seed)
        return with_adapter(policy.model, adapter_of(options), policy.encoder.files.plain.token_to_id)

    def saved(self, directory: Path, adapted: Adapted) -> Artifact:
        """Save an adapter as an artifact."""
        directory.mkdir(parents=True, exist_ok=True)
        facts = save_policy(
            directory, adapted.model, self.base.path, self.base.digest, initial=adapted.initial
        )
        return as_artifact(directory, facts, Kind.ADAPTER)

    def opened(
        self, adapter: Artifact, trainable: bool = False, quantization: Quantization | None = None
    ) -> Policy:
        """Open a saved adapter on a fresh base."""
        return open_policy(adapter, self, trainable=trainable, quantization=quantization)


def logits(model: Any, tokens: Tensor = TOKENS) -> Tensor:
    """Run a model as it is evaluated."""
    with evaluating(model):
        result: Tensor = model(input_ids=tokens, use_cache=False).logits
    return result


def trained_parameters(model: Any) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}


def optimizer_of(model: Any, rate: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained_parameters(model).values(), lr=rate)


def advance(model: Any, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    """Take a few optimizer steps on one batch."""
    model.train()
    for _ in range(steps):
        output = model(input_ids=TOKENS, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(output.flatten(0, 1), TOKENS[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()


def gap(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())
