"""Which layout a training uses: the cheapest one that is exact for its model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.contracts.trainer import Example, TokenSequence
from posttrain.errors import StageError
from posttrain_plugins.models.mode import evaluating
from posttrain_plugins.training.layouts.attention import keeping_implementation, parts
from posttrain_plugins.training.layouts.blocks import CALL, plan
from posttrain_plugins.training.layouts.layout import Flat, Layout, Placing
from posttrain_plugins.training.layouts.rows import Packed, Padded, SharedPrefix
from posttrain_plugins.training.microbatch import MicroBatch

LAYOUTS: Mapping[str, Layout] = {each.name: each for each in (Padded(), Packed(), SharedPrefix())}
"""By name, the simplest first."""

SCORE = 14
"""Floating-point operations of a score, forward and backward, times the size of a head."""
TOUCH = 200
"""A backward pass writes and adds up every gradient: operations a parameter that matrix products, at 64 GFLOP/s
a core, would do in that time (about 3 ns)."""
LAYER = 6e7
"""The same for starting the kernels of a layer, forward and backward: about 1 ms."""
SPAN = 512
"""Keys that the CPU's kernel computes at a time: beyond, a causal mask saves work."""
PROBE = 24
"""Tokens on either side of where an example's sequences part that are tried out."""
FAILURES = (
    StageError,
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    AssertionError,
)
"""What a model may raise that does not take a layout."""


Read = Callable[[Any, MicroBatch], Tensor]
"""(model, micro-batch) → what the model says at each selected place, shape [N]."""


def choose_layout(
    model: nn.Module,
    steps: Sequence[Sequence[Example]],
    probe: Sequence[Example],
    tolerance: float,
    wanted: str | None = None,
    read: Read | None = None,
) -> tuple[Layout, str | None]:
    """Choose the layout of a training and try it out.

    With several ranks each must be given the same, as the model is called.

    Args:
        model: The policy, possibly wrapped. It keeps the attention functions that the layout needs.
        steps: The examples of some steps, for the cost.
        probe: Some examples whose log-probs in the layout are compared with those of each sequence alone.
        tolerance: Largest difference of a log-prob, in nats.
        wanted: Name of the layout to use; None: the cheapest.
        read: What of the model is compared; log-probs unless given.

    Returns:
        The layout, and what to tell the user if a cheaper one is not exact for this model.

    Raises:
        StageError: The wanted layout does not exist or is not exact for this model.
    """
    if wanted is not None and wanted not in LAYOUTS:
        raise StageError("no such layout", where="layout", found=wanted, expected=" or ".join(LAYOUTS))
    ranked = (
        [LAYOUTS[wanted]] if wanted else sorted(LAYOUTS.values(), key=lambda each: _cost(model, each, steps))
    )
    told = None
    for layout in ranked:
        reason = why_not(model, layout, probe, tolerance, read)
        if reason is None:
            return layout, told
        if wanted:
            raise StageError(
                f"layout `{wanted}` is not exact for this model",
                where="layout",
                found=reason,
                expected=f"what the model says of each sequence alone, to {tolerance:g}",
                fix="leave the choice open, or use `padded`",
            )
        told = (
            told or f"layout `{layout.name}` would be cheaper, but it is not exact for this model: {reason}"
        )
    raise AssertionError("padded rows need no check")


def why_not(
    model: nn.Module, layout: Layout, probe: Sequence[Example], tolerance: float, read: Read | None = None
) -> str | None:
    """Return why a layout is not exact for a model, or None if it is; then the model is ready for it."""
    if isinstance(layout, Padded):
        return None
    samples = _samples(probe)
    if not any(sequence.predicted for each in samples for sequence in each.sequences):
        return "there is no token to try it out with"
    with evaluating(model), keeping_implementation(model) as keep:
        alone = [_read(model, LAYOUTS[Padded.name], [each], read) for each in _singles(samples)]
        try:
            together = _read(model, layout, samples, read)
        except torch.OutOfMemoryError:
            raise
        except FAILURES as error:
            return error.message if isinstance(error, StageError) else f"{type(error).__name__}: {error}"
        difference = float((together - torch.cat(alone)).abs().max())
        if difference <= tolerance:
            keep()
            return None
    return (
        f"a score differs by {difference:.3g} from that of its sequence alone, so the model mixes tokens "
        "by other means than attention"
    )


def _samples(probe: Sequence[Example]) -> list[Example]:
    """Take a short piece of every sequence, around the place where its example's sequences part; all of it with images.

    Every token of it is supervised, and there are at least two examples, so that a mixture would show.
    """
    samples = []
    for example in probe:
        start = max(0, example.prefix - PROBE)
        seeing = any(sequence.images for sequence in example.sequences)
        kept = slice(None) if seeing else slice(start, start + 2 * PROBE)
        cuts = [(sequence.tokens[kept], sequence.images) for sequence in example.sequences]
        sequences = tuple(
            TokenSequence(cut, [True] * len(cut), "probe", images=images) for cut, images in cuts
        )
        samples.append(replace(example, sequences=sequences))
    return samples if len(samples) > 1 else samples * 2


def _singles(examples: Sequence[Example]) -> list[Example]:
    return [replace(example, sequences=(sequence,)) for example in examples for sequence in example.sequences]


def _read(model: nn.Module, layout: Layout, examples: Sequence[Example], read: Read | None) -> Tensor:
    micro = layout.arrange(examples, 0, next(model.parameters()).device)
    with layout.attending(model, micro):
        return (read or _logp)(model, micro)


def _logp(model: nn.Module, micro: MicroBatch) -> Tensor:
    logits: Tensor = model(**micro.inputs).logits.flatten(0, 1)
    chosen = logits[micro.selected].float().log_softmax(-1)
    return chosen.gather(1, micro.targets[:, None])[:, 0]


@dataclass(frozen=True)
class _Costs:
    """Floating-point operations, forward and backward, of a token, a score in all layers, a call and a pass."""

    token: float
    score: float
    call: float
    step: float

    @classmethod
    def of(cls, config: Any) -> _Costs:
        """Estimate from a model's configuration; only ratios matter."""
        width, layers, heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
        size = getattr(config, "head_dim", None) or width // heads
        grouped = getattr(config, "num_key_value_heads", None) or heads
        inner = getattr(config, "intermediate_size", None) or 4 * width
        matrices = layers * (2 * width * size * (heads + grouped) + 3 * width * inner)
        score = SCORE * size * heads * layers
        parameters = matrices + config.vocab_size * width
        return cls(6 * matrices, score, CALL * score, TOUCH * parameters + LAYER * layers)


def _cost(model: nn.Module, layout: Layout, steps: Sequence[Sequence[Example]]) -> float:
    """Estimate the operations of some steps."""
    models = parts(model)
    if not models:
        return 0.0
    costs = _Costs.of(models[0].config.get_text_config())
    total = 0.0
    for step in filter(None, steps):
        for part in _cut(step, costs) if isinstance(layout, Padded) else [step]:
            scores, calls = _attended(layout.place(part, Flat.of(part)))
            total += costs.step + costs.token * layout.size(part) + costs.score * scores + costs.call * calls
    return total


def _cut(step: Sequence[Example], costs: _Costs) -> Iterator[list[Example]]:
    """Cut a step where padding would cost more than one more pass."""
    part: list[Example] = []
    waste = 0
    for example in sorted(step, key=attrgetter("longest"), reverse=True):
        padding = (part[0].longest - example.longest) * len(example.sequences) if part else 0
        if (waste + padding) * costs.token > costs.step:
            yield part
            part, waste, padding = [], 0, 0
        part.append(example)
        waste += padding
    yield part


def _attended(placing: Placing) -> tuple[int, int]:
    """Return how many scores are computed, and in how many calls."""
    rows, width = placing.shape
    if placing.segments is None:
        return rows * width * (width + min(width, SPAN)) // 2, 1
    blocks = plan(placing.segments, torch.device("cpu")).blocks
    return sum(each.count * each.queries * each.keys for each in blocks), len(blocks)
