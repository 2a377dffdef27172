"""XPO and Nash-MD against trl 1.13.0's own losses on the same numbers, which `generate_online.py` has written down.

Differences in definition, each with its reason:

- `nash_md`: trl weighs each token by its own log-ratio (`kl: token` here), the paper the answer by that of all of it.
- `xpo`: trl also takes IPO's loss in place of DPO's; here `loss: [ipo, …]` is a mixture, without exploration.
- Both: trl samples, scores and pairs answers while it trains; here rows have them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from posttrain.contracts.loss import AnswerTokens, PreferenceBatch
from posttrain_plugins.losses.preference.nash_md import NashMd
from posttrain_plugins.losses.preference.xpo import Xpo

TOLD: dict[str, Any] = json.loads(Path(__file__).with_name("online_of_trl.json").read_text(encoding="utf-8"))
CASES: list[tuple[str, Any, dict[str, Any]]] = [
    ("xpo", Xpo, {"alpha": TOLD["alpha"]}),
    ("nash_md", NashMd, {"kl": "token"}),
]


def batch_of(policy: Tensor) -> PreferenceBatch:
    """The pairs as posttrain has them: chosen first, whoever wrote it."""
    reference, own = torch.tensor(TOLD["reference"]).to(policy), torch.tensor(TOLD["chosen"])
    pairs, width = policy.shape[1:]
    rows = torch.arange(pairs)
    chosen, rejected = (~own).long(), own.long()
    tokens, known = (
        torch.stack([values[chosen, rows], values[rejected, rows]], 1) for values in (policy, reference)
    )
    probability = torch.tensor(TOLD["probability"]).to(policy)
    count = torch.full((pairs,), float(width)).to(policy)
    return PreferenceBatch(
        chosen=tokens[:, 0].sum(1),
        rejected=tokens[:, 1].sum(1),
        reference_chosen=known[:, 0].sum(1),
        reference_rejected=known[:, 1].sum(1),
        chosen_tokens=count,
        rejected_tokens=count,
        weight=torch.ones(pairs).to(policy),
        tokens=AnswerTokens(
            logp=tokens.flatten(),
            example=rows.repeat_interleave(2 * width),
            answer=torch.arange(2).repeat_interleave(width).repeat(pairs),
            place=torch.arange(width).repeat(2 * pairs),
            reference=known.flatten(),
        ),
        own=own,
        # The rows say how likely the chosen answer is preferred, trl how likely the policy's is.
        preference=torch.where(own, probability, 1 - probability),
    )


@pytest.mark.parametrize(("name", "kind", "options"), CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values_and_gradients_are_those_of_trl(
    name: str, kind: Any, options: dict[str, Any], dtype: torch.dtype
) -> None:
    policy = torch.tensor(TOLD["policy"], dtype=dtype).requires_grad_()
    loss = kind()
    config = loss.config(beta=TOLD["beta"], **options)
    (term,) = loss(batch_of(policy), config, {}, {}).terms
    term.values.mean().backward()
    assert policy.grad is not None
    assert term.values.mean().item() == pytest.approx(TOLD[name]["loss"], rel=1e-5)
    torch.testing.assert_close(
        policy.grad.double(), torch.tensor(TOLD[name]["gradient"]).double(), rtol=1e-5, atol=1e-6
    )


def test_the_answer_is_weighed_whole_as_in_the_paper() -> None:
    """The gradient is −(P − ½ − β log π(y)/π_ref(y)) ∇ log π(y): one weight for every token of the policy's answer."""
    policy = torch.tensor(TOLD["policy"]).double().requires_grad_()
    config = NashMd.config(beta=TOLD["beta"])
    (term,) = NashMd()(batch_of(policy), config, {}, {}).terms
    term.values.sum().backward()
    ratio = (policy.detach()[0] - torch.tensor(TOLD["reference"]).double()[0]).sum(1)
    weight = -(torch.tensor(TOLD["probability"]).double() - 0.5 - TOLD["beta"] * ratio)
    assert policy.grad is not None
    torch.testing.assert_close(policy.grad[0], weight[:, None].expand_as(policy.grad[0]))
    assert not policy.grad[1].any(), "the other answer is not learned from"
