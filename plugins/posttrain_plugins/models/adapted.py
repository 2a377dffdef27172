"""What adapters make of their bases, as merging handles it: policies, and models that give numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posttrain.artifacts.kinds import Kind, PolicyFacts, ScoreFacts
from posttrain.artifacts.manifest import Artifact, Manifest
from posttrain_plugins.models import probe
from posttrain_plugins.models.artifact import facts_of
from posttrain_plugins.models.policy import load_model, save_policy, usable_device
from posttrain_plugins.models.valued import base_with_head, numbers, open_valued, save_valued
from posttrain_plugins.models.valued_record import Probe, probes_of, write_record

if TYPE_CHECKING:
    from posttrain_plugins.training.peft_options import Quantization

Logits = Sequence[Tensor]


@dataclass(frozen=True)
class AdaptedPolicy:
    """A policy: what it says are the logits of every token.

    Args:
        adapter: The adapter.
        base: What it belongs to.
    """

    adapter: Artifact
    base: Artifact

    def bare(self, quantization: Quantization | None) -> Any:
        """Open the base in float32, or in few bits, as the adapter sits on it."""
        return load_model(self.base.path, "float32", quantization=quantization)

    def said(self, model: Any, sequences: Sequence[list[int]]) -> list[Tensor]:
        """Return what a model says of each sequence, float32, on the CPU."""
        return probe.logits_of(model, sequences)

    def save(self, directory: Path, model: Any) -> None:
        """Write the merged model."""
        save_policy(directory, model, self.adapter.path)

    def opened(self, directory: Path) -> Any:
        """Open what was saved, to compute in float32."""
        return load_model(directory, "float32").to(usable_device())

    def kept(self, directory: Path, model: Any, same: bool) -> PolicyFacts:
        """Write what is kept beside the weights, and return the facts.

        Args:
            directory: Where the model was saved.
            model: The same, opened again.
            same: Whether it is the one that was trained, but for rounding.
        """
        return facts_of(directory)

    @property
    def comparable(self) -> bool:
        """Whether the base alone says something that the adapter has changed."""
        return True

    def agreement(self, was: Logits, now: Logits) -> Mapping[str, float]:
        """Return how often both say the same."""
        return {"same_top_token": probe.agreement(was, now)}


class AdaptedJudge(AdaptedPolicy):
    """A model that gives numbers: what it says is one number for every token."""

    def bare(self, quantization: Quantization | None) -> Any:
        """Open the base with a head in place of its own, which the adapter's takes the place of."""
        return base_with_head(self.adapter, self.base, quantization=quantization)

    def said(self, model: Any, sequences: Sequence[list[int]]) -> list[Tensor]:
        """Return the numbers of each sequence, shape [tokens]."""
        probes = [Probe(tuple(tokens), tuple(range(len(tokens)))) for tokens in sequences]
        return [torch.tensor(values) for values in numbers(model, probes)]

    def save(self, directory: Path, model: Any) -> None:
        """Write the merged model with its head."""
        save_valued(directory, model, self.adapter.path)

    def opened(self, directory: Path) -> Any:
        """Open what was saved, to compute in float32."""
        kind = self.adapter.kind
        manifest = Manifest(kind=kind, facts=facts_of(directory), files=())
        saved = Artifact(manifest.digest, manifest, directory)
        return open_valued(saved, None, kind, device=usable_device()).model

    def kept(self, directory: Path, model: Any, same: bool) -> PolicyFacts:
        """Keep the adapter's statistics where they still hold, and what the model says of the adapter's probes."""
        scores = self.adapter.facts.scores
        if scores is not None and not same:
            scores = ScoreFacts(separator=scores.separator)
        probes = probes_of(self.adapter.path)
        told = zip(probes, numbers(model, probes), strict=True)
        write_record(directory, scores, [replace(each, values=tuple(values)) for each, values in told])
        return facts_of(directory)

    @property
    def comparable(self) -> bool:
        """A policy has no head of its own: the base is given a fresh one, which says nothing."""
        return self.base.kind is self.adapter.kind

    def agreement(self, was: Logits, now: Logits) -> Mapping[str, float]:
        """There is nothing to be most likely."""
        return {}


def adapted(adapter: Artifact, base: Artifact) -> AdaptedPolicy:
    """Return an adapter on its base, by what it makes of it."""
    return (AdaptedPolicy if adapter.kind is Kind.ADAPTER else AdaptedJudge)(adapter, base)
