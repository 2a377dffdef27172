"""Batched decoding in process: prompts in, token ids out. What is sampled does not depend on the batching.

Greedy decoding gives what `model.generate(do_sample=False)` gives. Sampling draws one uniform number per
(seed, prompt, sample, step) and inverts the distribution function with it, so a sample is the same in every
batch (apart from rounding in the model itself, about 1e-6 in the log-probs).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from posttrain.errors import DataError, StageError
from posttrain_plugins.models.mode import evaluating

if TYPE_CHECKING:
    from posttrain_plugins.models.policy import Policy

_COMPACT_BELOW = 7 / 8
"""Finished rows leave the batch once fewer than this share of its rows is still going."""
_NUCLEUS = 1024
"""Candidates looked at first for the nucleus; a full sort follows where their mass stays below top_p."""
_HEARD_EVERY = 16
"""Decoding steps between two calls of `progress`, so that a request to stop need not wait for a batch."""


@dataclass(frozen=True)
class Generation:
    """One completion; the stop token is not among the tokens.

    Args:
        tokens: The generated ids.
        finished: Whether the model stopped by itself; false when a length limit cut it off.
    """

    tokens: list[int]
    finished: bool


@dataclass(frozen=True)
class _Sampling:
    """How the next token is chosen; temperature 0 is greedy."""

    temperature: float
    top_p: float
    samples: int
    seed: int


def generate(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    samples: int = 1,
    seed: int = 0,
    batch_tokens: int = 16384,
    progress: Callable[[int, int], None] | None = None,
) -> list[list[Generation]]:
    """Generate `samples` completions for each prompt.

    Args:
        policy: The model with its encoder; generation ends at any of `policy.encoder.stop_ids`.
        prompts: Token ids of each prompt, none empty.
        max_new_tokens: Longest completion. A completion is also cut off at the model's context length.
        temperature: Divides the logits; 0 takes the likeliest token.
        top_p: Samples from the smallest set of tokens whose probability reaches this (Holtzman et al., arXiv
            1904.09751).
        samples: Completions per prompt; the prompt is computed once for all of them.
        seed: Seeds the samples; not negative.
        batch_tokens: Upper bound of cached tokens in one batch; a batch holds at least one prompt with its
            samples.
        progress: Called with (prompts done, prompts in all) after each batch and every few decoding steps; may
            raise to stop.

    Returns:
        For each prompt, in the order given, its completions.

    Raises:
        DataError: A prompt is empty or leaves no room in the model's context.
        StageError: The model's logits are not finite, or it is not a decoder with a key-value cache.
    """
    _require_decoder(policy.model)
    limits = _limits(policy.model, prompts, max_new_tokens)
    sampling = _Sampling(temperature, top_p, samples, seed)
    found: list[list[Generation]] = [[] for _ in prompts]
    done, report = 0, progress or _unheard
    with evaluating(policy.model):
        for batch in _batches(prompts, limits, samples, batch_tokens):
            decoder = _Decoder(policy, [prompts[i] for i in batch], batch, sampling)
            pause = partial(report, done, len(prompts))
            for index, generations in zip(batch, decoder.run([limits[i] for i in batch], pause), strict=True):
                found[index] = generations
            done += len(batch)
            report(done, len(prompts))
    return found


def _unheard(done: int, total: int) -> None:
    """Stand in for a `progress` that nobody gave."""


class _Decoder:
    """Decodes one batch of left-padded prompts.

    Rows are (prompt, sample) pairs, a prompt's samples adjacent.
    """

    def __init__(
        self, policy: Policy, prompts: Sequence[Sequence[int]], indices: Sequence[int], sampling: _Sampling
    ) -> None:
        self.model = policy.model
        self.prompts = prompts
        self.sampling = sampling
        self.device = next(policy.model.parameters()).device
        self.stops = torch.tensor(sorted(policy.encoder.stop_ids), dtype=torch.long, device=self.device)
        self.rows = [(index, sample) for index in indices for sample in range(sampling.samples)]

    def run(self, limits: Sequence[int], pause: Callable[[], None]) -> list[list[Generation]]:
        """Return the generations of each prompt; `pause` is called every few steps and may raise."""
        repeats, steps = self.sampling.samples, max(limits)
        limit = torch.tensor(limits, device=self.device).repeat_interleave(repeats)
        uniforms = self._uniforms(steps)
        tokens = torch.zeros((len(self.rows), steps), dtype=torch.long, device=self.device)
        lengths = torch.zeros(len(self.rows), dtype=torch.long, device=self.device)
        finished = torch.zeros(len(self.rows), dtype=torch.bool, device=self.device)
        # `slot` maps the rows still in the cache to all rows; `going` says which of them still generate.
        slot = torch.arange(len(self.rows), device=self.device)
        going = torch.ones_like(finished)
        logits, cache, mask, positions = self._prefill(steps)
        for step in range(steps):
            if step % _HEARD_EVERY == _HEARD_EVERY - 1:
                pause()
            chosen = self._choose(logits, uniforms[slot, step] if uniforms is not None else None)
            stopped = torch.isin(chosen, self.stops)
            finished[slot] |= going & stopped
            going = going & ~stopped
            tokens[slot[going], step] = chosen[going]
            lengths[slot[going]] += 1
            going = going & (lengths[slot] < limit[slot])
            alive = int(going.sum())
            if alive == 0:
                break
            if alive < _COMPACT_BELOW * len(slot):
                kept = going.nonzero().squeeze(1)
                cache.batch_select_indices(kept)
                slot, going, chosen = slot[kept], going[kept], chosen[kept]
                mask, positions = mask[kept], positions[kept]
            width = mask.shape[1] - steps + step + 1
            mask[:, width - 1] = 1
            output = self.model(
                input_ids=chosen[:, None], attention_mask=mask[:, :width], position_ids=positions[:, None],
                cache=cache, use_cache=True,
            )  # fmt: skip
            # A row that has ended stays where it is: past the context there may be no position to embed.
            logits, positions = output.logits[:, -1], positions + going
        return self._collect(tokens, lengths, finished)

    def _prefill(self, steps: int) -> tuple[Tensor, Any, Tensor, Tensor]:
        """Run the prompts once and repeat the result for every sample.

        Returns:
            Logits [rows, V] of the first new token, the cache, a mask [rows, prompt + steps] that is 1 on the
            prompt so far, and the position [rows] of the first new token.
        """
        from transformers import DynamicCache

        width, repeats = max(map(len, self.prompts)), self.sampling.samples
        ids = torch.zeros((len(self.prompts), width), dtype=torch.long)
        mask = torch.zeros((len(self.prompts), width + steps), dtype=torch.long)
        for row, prompt in enumerate(self.prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) : width] = 1
        ids, mask = ids.to(self.device), mask.to(self.device)
        positions = (mask[:, :width].cumsum(1) - 1).clamp(min=0)
        cache = DynamicCache(config=self.model.config)
        output = self.model(
            input_ids=ids, attention_mask=mask[:, :width], position_ids=positions,
            cache=cache, use_cache=True, **self._last_logits(),
        )  # fmt: skip
        logits, following = output.logits[:, -1], positions[:, -1] + 1
        if repeats > 1:
            cache.batch_repeat_interleave(repeats)
        return (
            logits.repeat_interleave(repeats, 0),
            cache,
            mask.repeat_interleave(repeats, 0),
            following.repeat_interleave(repeats, 0),
        )

    def _last_logits(self) -> dict[str, int]:
        """Ask for the last position's logits alone, where the model's forward can be asked."""
        return {"logits_to_keep": 1} if self.model._supports_logits_to_keep() else {}

    def _uniforms(self, steps: int) -> Tensor | None:
        """Return uniform numbers [rows, steps], each a function of (seed, prompt, sample, step) alone."""
        if self.sampling.temperature == 0:
            return None
        drawn = [
            np.random.Generator(
                np.random.Philox(key=np.array([self.sampling.seed, (index << 32) + sample], dtype=np.uint64))
            ).random(steps)
            for index, sample in self.rows
        ]
        return torch.from_numpy(np.stack(drawn)).to(self.device)

    def _choose(self, logits: Tensor, uniforms: Tensor | None) -> Tensor:
        """Return the next token of each row, shape [rows], from logits [rows, V]."""
        best, greedy = logits.max(dim=-1)
        if not bool(torch.isfinite(best).all()):
            raise StageError(
                "the model's logits are not finite",
                where="generation",
                fix="look at the training that produced the model: its weights have probably diverged",
            )
        if uniforms is None:
            return greedy
        probabilities = torch.softmax(logits.double() / self.sampling.temperature, dim=-1)
        return invert(nucleus(probabilities, self.sampling.top_p), uniforms)

    def _collect(self, tokens: Tensor, lengths: Tensor, finished: Tensor) -> list[list[Generation]]:
        ids, counts, ended = tokens.tolist(), lengths.tolist(), finished.tolist()
        every = [Generation(row[:count], end) for row, count, end in zip(ids, counts, ended, strict=True)]
        repeats = self.sampling.samples
        return [every[start : start + repeats] for start in range(0, len(every), repeats)]


def nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Zero what lies outside the smallest set of tokens whose probability reaches `top_p`.

    Tokens tied with the set's least likely one stay in, so that the set does not depend on a sort's order.

    Args:
        probabilities: Shape [rows, V], each row summing to 1.
        top_p: In (0, 1].

    Returns:
        Shape [rows, V]; the rows no longer sum to 1.
    """
    if top_p >= 1:
        return probabilities
    size = probabilities.shape[-1]
    top = probabilities.topk(min(_NUCLEUS, size), dim=-1).values
    if bool((top.sum(-1) < top_p).any()):
        top = probabilities.sort(dim=-1, descending=True).values
    before = top.cumsum(-1) - top
    last = (before < top_p).sum(-1, keepdim=True) - 1
    return torch.where(probabilities >= top.gather(-1, last), probabilities, 0.0)


def invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Invert the distribution function: the first token whose cumulated weight exceeds uniform · total.

    Args:
        weights: Shape [rows, V], float64, not negative, not all zero.
        uniforms: Shape [rows], float64, in [0, 1).

    Returns:
        Token ids, shape [rows]; never one of weight zero.
    """
    cumulated = weights.cumsum(-1)
    total = cumulated[:, -1]
    # A product rounded up to the total would select a token behind the last one that has any weight.
    target = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulated, target[:, None], right=True).squeeze(-1)


def _batches(
    prompts: Sequence[Sequence[int]], limits: Sequence[int], samples: int, batch_tokens: int
) -> Iterator[list[int]]:
    """Yield batches of prompt indices, longest first, each within the token budget."""
    order = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), i))
    batch: list[int] = []
    width = steps = 0
    for index in order:
        width, steps = max(width, len(prompts[index])), max(steps, limits[index])
        if batch and (len(batch) + 1) * samples * (width + steps) > batch_tokens:
            yield batch
            batch, width, steps = [], len(prompts[index]), limits[index]
        batch.append(index)
    if batch:
        yield batch


def _limits(model: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[int]:
    """Return how many tokens each prompt may get: `max_new_tokens`, or what the context leaves."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    limits = []
    for index, prompt in enumerate(prompts):
        room = max_new_tokens if context is None else min(max_new_tokens, context - len(prompt))
        if not prompt or room < 1:
            raise DataError(
                "this prompt has no tokens" if not prompt else "this prompt fills the model's whole context",
                where=f"prompt {index}",
                found=f"{len(prompt)} tokens",
                expected=f"1 to {context - 1} tokens" if context is not None else "at least 1 token",
                fix="drop the row, or use a model with a longer context",
            )
        limits.append(room)
    return limits


def _require_decoder(model: Any) -> None:
    """Refuse models whose state a key-value cache does not hold."""
    if model.config.is_encoder_decoder or getattr(model, "_is_stateful", False):
        raise StageError(
            "generation needs a decoder-only model whose state is a key-value cache",
            where="generation",
            found=model.config.model_type,
        )
