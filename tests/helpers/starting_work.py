"""What tests of the starting policy let ranks do. Importing it computes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from helpers.models import tiny_llama
from helpers.rank_work import on_ranks, parallel_of
from torch import Tensor

from posttrain.contracts.backend import Parallel, Place
from posttrain.contracts.stage import StageContext
from posttrain_plugins.models.mode import evaluating
from posttrain_plugins.training.adapters import with_adapter
from posttrain_plugins.training.peft_options import Lora
from posttrain_plugins.training.starting import StartingPolicy

TOKENS = torch.arange(4, 16)[None]


def looks(directory: Path, backend: Mapping[str, Any], inits: list[str | None]) -> dict[str, Any]:
    """Train on two ranks and look at the starting policy after each step, for each initialization of LoRA."""
    return on_ranks(directory, 2, partial(_looks, backend, inits))  # type: ignore[no-any-return]


def _looks(
    backend: Mapping[str, Any], inits: list[str | None], context: StageContext, place: Place
) -> dict[str, Any]:
    parallel = parallel_of(backend, place)
    found = {str(init): _look(parallel, init) for init in inits}
    parallel.close()
    return found


def _look(parallel: Parallel, init: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = tiny_llama(40)
    if init is not None:
        model = with_adapter(model, Lora(r=2, init=init)).model
    parallel.prepare(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    wrapped, optimizer = parallel.wrap(model, torch.optim.AdamW(trained, lr=1e-2))

    def probe() -> Tensor:
        with evaluating(wrapped):
            logits: Tensor = wrapped(input_ids=TOKENS, use_cache=False).logits.clone()
        return logits

    start = probe()
    starting = StartingPolicy.of(wrapped, probe)
    seen = []
    for _ in range(3):
        wrapped.train()
        loss = wrapped(input_ids=TOKENS + parallel.rank, use_cache=False).logits.float().pow(2).mean()
        parallel.backward(loss, True)
        parallel.clip(wrapped, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with starting.active():
            seen.append(torch.equal(probe(), start))
    end = probe()
    with starting.active():
        pass
    return {
        "start": seen,
        "moved": float((end - start).abs().max()),
        "back": torch.equal(probe(), end),
        "memory": starting.memory,
        "trained": sum(4 * parameter.numel() for parameter in trained),
    }
