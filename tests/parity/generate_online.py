"""Writes `online_of_trl.json`: what XPO and Nash-MD come to in trl 1.13.0, the last release that has them.

It does not install beside the release that other tests compare with. Unpack its wheel and name the folder:
`PYTHONPATH=FOLDER .venv/bin/python tests/parity/generate_online.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

FIXTURE = Path(__file__).with_name("online_of_trl.json")
PAIRS, TOKENS = 5, 4
BETA, ALPHA = 0.3, 0.05


def main() -> None:
    """Ask each trainer for its loss on the same random numbers."""
    import trl
    from trl.experimental.nash_md.nash_md_trainer import NashMDTrainer
    from trl.experimental.xpo.xpo_trainer import XPOTrainer

    source = torch.Generator().manual_seed(0)
    policy = -2 * torch.rand(2, PAIRS, TOKENS, generator=source, dtype=torch.float64)
    reference = policy + 0.5 * torch.randn(policy.shape, generator=source, dtype=torch.float64)
    chosen = torch.arange(PAIRS) % 2 == 0
    probability = torch.rand(PAIRS, generator=source, dtype=torch.float64)
    options = SimpleNamespace(loss_type="sigmoid")
    asked = SimpleNamespace(args=options, beta=BETA, alpha=ALPHA)

    def xpo(model: Tensor) -> Tensor:
        return XPOTrainer._compute_losses(asked, model[0], model[1], reference[1], reference[0], chosen)[0]

    def nash(model: Tensor) -> Tensor:
        return NashMDTrainer._compute_losses(asked, model[0], reference[0], probability)[0]

    written = {
        "trl": trl.__version__,
        "beta": BETA,
        "alpha": ALPHA,
        "policy": policy.tolist(),
        "reference": reference.tolist(),
        "chosen": chosen.tolist(),
        "probability": probability.tolist(),
        "xpo": _told(xpo, policy),
        "nash_md": _told(nash, policy),
    }
    FIXTURE.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def _told(loss: Any, policy: Tensor) -> dict[str, Any]:
    """The loss, and its gradient by each token's log-prob: of the policy's answers, then of the others."""
    model = policy.clone().requires_grad_()
    value = loss(model)
    value.backward()
    return {"loss": value.item(), "gradient": model.grad.tolist()}


if __name__ == "__main__":
    main()
