"""The ways from hidden states to scores: through the decoder and the head alone, or through the model's own logits.

All of them call the policy as its backend wrapped it, once, with keyword arguments, and get their result as its
output, so that the hooks of DDP, FSDP2 and ZeRO-3 gather, prefetch and reduce as in any forward pass.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from posttrain_plugins.training.head.fused import MEMORY, Plan, choose_chunk, linear_scores
from posttrain_plugins.training.head.logits import logit_scores
from posttrain_plugins.training.head.scores import Head, Tail, TokenScores, Wanted
from posttrain_plugins.training.head.statistics import pieces
from posttrain_plugins.training.microbatch import MicroBatch


def unwrapped(model: Any) -> Any:
    """Return the policy inside DDP, a DeepSpeed engine and the like: what they hold as their child `module`."""
    while isinstance(inner := getattr(model, "_modules", {}).get("module"), nn.Module):
        model = inner
    return model


def parts_of(model: Any) -> tuple[Any, nn.Module]:
    """Return the decoder and the head of a policy; adapters and wrappers are looked through.

    Raises:
        AttributeError, NotImplementedError: The model has none that it could name.
    """
    plain = unwrapped(model)
    decoder, head = _decoder(plain), plain.get_output_embeddings()
    if not isinstance(decoder, nn.Module) or not isinstance(head, nn.Module):
        raise AttributeError("the model names no decoder and head")
    return decoder, head


def _decoder(plain: Any) -> Any:
    """Return what makes hidden states of a model's inputs: where these may be pixels, all but the head."""
    if not hasattr(getattr(plain, "config", None), "vision_config"):
        return plain.get_decoder()
    inner = plain.get_base_model() if hasattr(plain, "get_base_model") else plain
    return inner.base_model


@contextmanager
def forward_as(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Give one module another `forward(self, ...)` for a while; its hooks stay."""
    before = vars(module).get("forward")
    module.forward = MethodType(forward, module)
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


@dataclass
class DecoderHead(Head):
    """Calls the decoder, then the head with the hidden states of selected positions alone.

    Args:
        tail: What the model does with its head's output.
        memory: Bytes of logits that may be kept for the backward pass.
    """

    tail: Tail = field(default_factory=Tail)
    memory: int = MEMORY
    bounded = True

    def __call__(self, model: Any, micro: MicroBatch, wanted: Wanted) -> TokenScores:
        """See `Head`."""
        decoder, head = parts_of(model)

        def forward(_: Any, *, selected: Tensor, targets: Tensor, **inputs: Any) -> dict[str, Tensor]:
            hidden = decoder(**inputs)[0]
            rows = hidden.flatten(0, -2).index_select(0, selected)
            return self.score(head, rows, targets, wanted).given

        with forward_as(unwrapped(model), forward):
            return TokenScores(**model(selected=micro.selected, targets=micro.targets, **micro.inputs))

    @abstractmethod
    def score(self, head: nn.Module, rows: Tensor, targets: Tensor, wanted: Wanted) -> TokenScores:
        """Score the targets of N hidden states, shape [N, H]; `head` is to be called, not looked into."""


@dataclass
class AnalyticHead(DecoderHead):
    """A linear head, fused with its softmax (`LinearScores`)."""

    @staticmethod
    def fits(head: nn.Module) -> bool:
        """Tell whether a head is what `torch.nn.Linear` computes: FSDP2 swaps the class, quantization the forward."""
        if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
            return False
        return "forward" not in vars(head) and head.weight.is_floating_point()

    def score(self, head: nn.Module, rows: Tensor, targets: Tensor, wanted: Wanted) -> TokenScores:
        """See `DecoderHead`."""

        def forward(linear: Any, hidden: Tensor) -> dict[str, Tensor]:
            weight = linear.weight
            plan = Plan(self.tail, wanted, choose_chunk(len(weight), hidden.dtype), self.memory)
            return linear_scores(hidden, weight, linear.bias, targets, plan).given

        with forward_as(head, forward):
            return TokenScores(**head(rows))


@dataclass
class GenericHead(DecoderHead):
    """Any module as head, such as one with an adapter: its own logits, for a few positions at a time if need be.

    Args:
        vocabulary: Logits of one position.
    """

    vocabulary: int = 1

    def score(self, head: nn.Module, rows: Tensor, targets: Tensor, wanted: Wanted) -> TokenScores:
        """See `DecoderHead`."""

        def part(hidden: Tensor, chosen: Tensor) -> dict[str, Tensor]:
            return logit_scores(head(hidden), chosen, wanted, self.tail).given

        # Where they fit, computing them once is faster.
        if len(rows) * self.vocabulary * 4 <= self.memory:
            return TokenScores(**part(rows, targets))
        size = choose_chunk(self.vocabulary, torch.float32)
        cut = [checkpoint(part, rows[of], targets[of], use_reentrant=False) for of in pieces(len(rows), size)]
        return TokenScores(**{name: torch.cat([each[name] for each in cut]) for name in cut[0]})


@dataclass
class KeepHead(Head):
    """Asks the model for the logits of some positions (`logits_to_keep`)."""

    def __call__(self, model: Any, micro: MicroBatch, wanted: Wanted) -> TokenScores:
        """See `Head`."""
        logits = model(**micro.inputs, logits_to_keep=micro.predicting).logits
        # The mask gives each position once, row by row; several tokens may be predicted from the same one.
        kept, place = torch.unique(micro.selected, return_inverse=True)
        if logits.dim() != 2 or len(logits) != len(kept):
            raise TypeError("the model ignores `logits_to_keep`")
        return logit_scores(logits.index_select(0, place), micro.targets, wanted)


@dataclass
class FullHead(Head):
    """Has the model compute all logits, then selects: right for every model, and the most expensive."""

    full = True

    def __call__(self, model: Any, micro: MicroBatch, wanted: Wanted) -> TokenScores:
        """See `Head`."""
        inputs = micro.inputs
        # A row in which nothing may be attended to would be a softmax over nothing.
        if micro.segments is None and micro.examples:
            inputs["attention_mask"] = micro.real.long()
        logits = model(**inputs).logits.flatten(0, -2).index_select(0, micro.selected)
        return logit_scores(logits, micro.targets, wanted)
