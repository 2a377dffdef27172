"""Writes `bco_of_trl.json`: what BCO comes to in trl 1.13.0, the last release that has it.

It does not install beside the release that other tests compare with. Unpack its wheel and name the folder:
`PYTHONPATH=FOLDER .venv/bin/python tests/parity/generate_bco.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

FIXTURE = Path(__file__).with_name("bco_of_trl.json")
BETA, STEPS = 0.3, 6


def main() -> None:
    """Take some steps with one running mean."""
    import trl
    from trl.experimental.bco.bco_trainer import BCOTrainer, RunningMoments

    source = torch.Generator().manual_seed(0)
    trainer = SimpleNamespace(
        beta=BETA,
        running=RunningMoments(SimpleNamespace(use_distributed=False)),
        match_underlying_distribution=True,
        args=SimpleNamespace(min_density_ratio=0.5, max_density_ratio=10.0),
    )
    trainer._get_chosen_prob = lambda probabilities: probabilities
    trainer._get_udm_weight = lambda probabilities: BCOTrainer._get_udm_weight(trainer, probabilities)
    steps = [_step(trainer, BCOTrainer.bco_loss, source) for _ in range(STEPS)]
    written = {"trl": trl.__version__, "beta": BETA, "steps": steps}
    FIXTURE.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def _step(trainer: Any, loss: Any, source: torch.Generator) -> dict[str, Any]:
    good, bad = (int(torch.randint(1, 5, (), generator=source)) for _ in range(2))
    logp = (-20 * torch.rand(good + bad, generator=source, dtype=torch.float64)).requires_grad_()
    reference = logp.detach() + 4 * torch.randn(good + bad, generator=source, dtype=torch.float64)
    probabilities = torch.rand(bad, generator=source, dtype=torch.float64)
    values, *_, delta = loss(
        trainer, logp[:good], logp[good:], reference[:good], reference[good:], None, probabilities
    )
    values.mean().backward()
    return {
        "good": good,
        "logp": logp.tolist(),
        "reference": reference.tolist(),
        "probabilities": probabilities.tolist(),
        "weights": trainer._get_udm_weight(probabilities).tolist(),
        "loss": values.mean().item(),
        "delta": float(delta),
        "gradient": logp.grad.tolist(),
    }


if __name__ == "__main__":
    main()
