"""Log-probs of supervised tokens without logits for all the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from posttrain.errors import StageError
from posttrain_plugins.models.mode import evaluating
from posttrain_plugins.training.batches import Budget, MicroBatch
from posttrain_plugins.training.options import LOGITS

Head = Callable[[Any, MicroBatch], Tensor]
"""(model, micro-batch) → logits at the positions that predict a supervised token, shape [N, V]."""

CHUNK = 1 << 22
"""Logits that are turned into float32 at a time."""

TOLERANCE = {False: 1e-4, True: 0.05}
"""Largest difference in nats between a log-prob computed the fast and the plain way, by `bf16`."""


def selected_logits(model: Any, micro: MicroBatch) -> Tensor:
    """Let only the predicting positions reach the head. A causal model never looks at right padding."""
    logits: Tensor = model(input_ids=micro.tokens, use_cache=False, logits_to_keep=micro.predicting).logits
    return logits


def full_logits(model: Any, micro: MicroBatch) -> Tensor:
    """Compute all logits, then select: for models that ignore `logits_to_keep` or look at padding."""
    logits: Tensor = model(input_ids=micro.tokens, attention_mask=micro.real.long(), use_cache=False).logits
    return logits[micro.predicting]


def vocabulary_of(model: Any) -> int:
    """Return how many logits a position has."""
    return int(model.config.get_text_config().vocab_size)


def budget_of(model: Any, head: Head, tokens: int) -> Budget:
    """Bound a micro-batch by tokens and by logits, of which the plain head has some for every token."""
    positions = max(1, LOGITS // vocabulary_of(model))
    return Budget(min(tokens, positions)) if head is full_logits else Budget(tokens, positions)


def choose_head(model: Any, probe: MicroBatch, tolerance: float) -> tuple[Head, str | None]:
    """Try the fast way on a few rows against the plain one.

    Args:
        model: The policy; it is put into evaluation mode for the trial.
        probe: Rows of different lengths.
        tolerance: Largest acceptable difference of a log-prob, in nats.

    Returns:
        The head to use, and what to tell the user when it is not the fast one.
    """
    with evaluating(model):
        expected = _log_probs(full_logits(model, probe), probe.targets)
        try:
            found = selected_logits(model, probe)
        except TypeError:
            return full_logits, "the model's forward takes no `logits_to_keep`; all logits are computed"
    if found.dim() != 2 or len(found) != len(probe.targets):
        return (
            full_logits,
            "the model ignores `logits_to_keep`; all logits are computed, which takes more memory",
        )
    gap = float((_log_probs(found, probe.targets) - expected).abs().max())
    if gap <= tolerance:
        return selected_logits, None
    return full_logits, (
        f"log-probs of selected positions differ from plain ones by {gap:.2g} nats; all logits are computed"
    )


class TokenLogProbs(torch.autograd.Function):
    """log softmax(logits)[target], and with it the entropy and whether the target is the most likely token.

    Computed in float32, a few rows at a time; the backward pass holds one tensor of the logits' size and no
    more. ∂ log p(y) / ∂ z = onehot(y) − softmax(z).
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, diagnostics: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probs, entropy and top-1 flags, shape [N]; the latter two are zeros unless asked for."""
        size = logits.shape[:1]
        logp, normalizer = (
            logits.new_empty(size, dtype=torch.float32),
            logits.new_empty(size, dtype=torch.float32),
        )
        entropy, top1 = torch.zeros_like(logp), torch.zeros(size, dtype=torch.bool, device=logits.device)
        for rows in _chunks(logits):
            block = logits[rows].float()
            normalizer[rows] = torch.logsumexp(block, -1)
            logp[rows] = block.gather(1, targets[rows, None])[:, 0] - normalizer[rows]
            if diagnostics:
                top1[rows] = block.argmax(-1) == targets[rows]
                entropy[rows] = torch.special.entr((block - normalizer[rows, None]).exp_()).sum(-1)
        ctx.save_for_backward(logits, targets, normalizer)
        ctx.mark_non_differentiable(entropy, top1)
        return logp, entropy, top1

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, None, None]:
        """Return the gradient of the logits, shape [N, V]."""
        logits, targets, normalizer = ctx.saved_tensors
        out = torch.empty_like(logits)
        for rows in _chunks(logits):
            block = (logits[rows].float() - normalizer[rows, None]).exp_().mul_(-grad[rows, None])
            out[rows] = block.scatter_add_(1, targets[rows, None], grad[rows, None])
        return out, None, None


def token_log_probs(logits: Tensor, targets: Tensor, diagnostics: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Apply `TokenLogProbs`: logits [N, V] and targets [N] to log-probs, entropy and top-1 flags, each [N]."""
    apply: Callable[..., tuple[Tensor, Tensor, Tensor]] = TokenLogProbs.apply
    return apply(logits, targets, diagnostics)


def _chunks(logits: Tensor) -> Iterator[slice]:
    size = max(1, CHUNK // max(1, logits.shape[-1]))
    for start in range(0, len(logits), size):
        yield slice(start, start + size)


def _log_probs(logits: Tensor, targets: Tensor) -> Tensor:
    if not len(targets):
        raise StageError("a probe of the model's head needs supervised tokens")
    return token_log_probs(logits, targets, False)[0]
