"""Which lengths a model reads alike whatever stands beside them.

Some rotary embeddings choose their frequencies by the longest row of a pass (`dynamic`, `longrope`): beyond a length,
what a model says of a row depends on its company, and neither a cut into micro-batches nor a reference that was scored
before would be exact. Up to that length they are like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from posttrain.contracts.trainer import Example
from posttrain.errors import StageError


def reach(model: nn.Module) -> int | None:
    """Return how long a row may be that is read alike in any company; None: any length."""
    return min((limit for module in model.modules() for limit in _limits(module)), default=None)


def require_reach(limit: int | None, examples: Iterable[Example]) -> None:
    """Refuse rows that are longer than `reach`.

    Raises:
        StageError: One is.
    """
    if limit is None:
        return
    longest = max((example.longest for example in examples), default=0)
    if longest > limit:
        raise StageError(
            "the positions of this model depend on the longest row that it sees at once",
            where="rope_type in the model's config",
            found=f"a sequence of {longest} tokens",
            expected=f"at most {limit}, up to which a row is computed as if it were alone",
            fix=f"set `max_length: {limit}`",
        )


def _limits(module: Any) -> Iterator[int]:
    """Yield the lengths up to which a rotary embedding keeps its frequencies, by type of layer where it has several."""
    kind = getattr(module, "rope_type", None)
    by_layer = kind.items() if isinstance(kind, Mapping) else [(None, kind)]
    for layer, rope in by_layer:
        if rope == "longrope":
            settings = module.config.rope_parameters
            yield int((settings if layer is None else settings[layer])["original_max_position_embeddings"])
        elif isinstance(rope, str) and "dynamic" in rope:
            yield int(module.original_max_seq_len)
