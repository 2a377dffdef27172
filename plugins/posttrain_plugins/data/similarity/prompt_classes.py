"""Which prompts have good answers and which bad ones, as a model sees them: what `data.match_prompts` does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from posttrain.artifacts.kinds import Kind
from posttrain.contracts.stage import Outcome, StageContext
from posttrain.errors import DataError
from posttrain_plugins.data.conversation import tools_of
from posttrain_plugins.data.derivation import write_derived
from posttrain_plugins.data.formats.passages import arguments_of
from posttrain_plugins.data.match_prompts import MatchPromptsConfig
from posttrain_plugins.data.rows import read_rows
from posttrain_plugins.models.mode import evaluating
from posttrain_plugins.models.policy import Policy, open_policy, usable_device
from posttrain_plugins.stopping import pauses
from posttrain_plugins.training.head.paths import parts_of

STRENGTH = 1.0
"""Weight of |w|²/2 beside the classifier's summed log-loss."""
ITERATIONS = 200


def run(context: StageContext) -> Outcome:
    """Fit the classifier and write the rows of port `data` with their weights.

    Raises:
        DataError: All rows are on one side, or have the column already.
        Interrupted: The stage was asked to stop.
    """
    config: MatchPromptsConfig = context.config
    data = context.input("data")
    rows = read_rows(data)
    _require(rows, config.column)
    policy = open_policy(context.input("model"), context, device=usable_device())
    pause = pauses(context, "prompts", "embedding prompts")
    prompts = [_prompt(row, policy, config.max_length) for row in rows]
    told = embeddings(policy, prompts, config.batch_tokens, lambda done: pause(done, len(rows)))
    features = standardized(told)
    good = torch.tensor([row["label"] for row in rows])
    likely = probabilities(features, good, config.sample, config.seed)
    weights = density_ratio(likely, good, config.min_ratio, config.max_ratio).tolist()
    weighed = ({**row, config.column: weight} for row, weight in zip(rows, weights, strict=True))
    context.describe("data", Kind.DATASET, write_derived(context.output("data"), weighed, data))
    figures = {
        "rows": float(len(rows)),
        "accuracy": float(_balanced(likely, good)),
        "weight": float(torch.tensor(weights)[~good].mean()),
    }
    summary = (
        f"prompts are told apart with {figures['accuracy']:.0%}, bad answers weigh {figures['weight']:.2f}"
    )
    return Outcome(figures=figures, summary=summary)


def embeddings(
    policy: Policy, prompts: Sequence[Sequence[int]], batch_tokens: int, pause: Callable[[int], None]
) -> Tensor:
    """Return the mean of the last hidden states of each prompt, shape [rows, width], float32.

    Args:
        policy: The model.
        prompts: Token ids.
        batch_tokens: Tokens, padding included, of one forward pass.
        pause: Called with the number of prompts done; may raise to stop.
    """
    decoder, _ = parts_of(policy.model)
    device = next(decoder.parameters()).device
    found: dict[int, Tensor] = {}
    with evaluating(policy.model):
        for part in _batches(prompts, batch_tokens):
            longest = max(len(prompts[row]) for row in part)
            tokens = torch.zeros(len(part), longest, dtype=torch.long)
            real = torch.zeros(len(part), longest)
            for place, row in enumerate(part):
                tokens[place, : len(prompts[row])] = torch.tensor(prompts[row])
                real[place, : len(prompts[row])] = 1
            tokens, real = tokens.to(device), real.to(device)
            hidden = decoder(input_ids=tokens, attention_mask=real.long())[0].float()
            means = (hidden * real[..., None]).sum(1) / real.sum(1, keepdim=True)
            found |= dict(zip(part, means.cpu(), strict=True))
            pause(len(found))
    return torch.stack([found[row] for row in range(len(prompts))])


def standardized(features: Tensor) -> Tensor:
    """Return features with mean 0 and deviation 1, float64; one that never changes is 0."""
    features = features.double()
    deviation = features.std(0, correction=0)
    return (features - features.mean(0)) / torch.where(deviation > 0, deviation, 1)


def probabilities(features: Tensor, good: Tensor, sample: int, seed: int) -> Tensor:
    """Return how likely each row is a good one if both sides were equally many, shape [rows].

    Args:
        features: Shape [rows, width].
        good: Which rows are good, shape [rows], bool.
        sample: Rows of each side that are looked at.
        seed: Seed of their choice.
    """
    random = Random(f"match_prompts:{seed}")
    sides = [side.nonzero()[:, 0].tolist() for side in (good, ~good)]
    chosen = torch.tensor([row for side in sides for row in random.sample(side, min(sample, len(side)))])
    weights = fitted(features[chosen], good[chosen])
    return (features @ weights[:-1] + weights[-1]).sigmoid()


def fitted(features: Tensor, good: Tensor) -> Tensor:
    """Fit a logistic regression in which both sides count alike, and return its weights and bias, shape [width + 1].

    It minimizes Σ c · log-loss + |w|²/2, which has one minimum; c makes both sides add up to half of all rows.
    """
    signs, counts = torch.where(good, 1.0, -1.0).double(), [good.sum(), (~good).sum()]
    share = len(good) / 2 * torch.where(good, 1 / counts[0], 1 / counts[1])
    weights = features.new_zeros(features.shape[1] + 1).requires_grad_()
    optimizer = torch.optim.LBFGS([weights], max_iter=ITERATIONS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        margins = signs * (features @ weights[:-1] + weights[-1])
        total = (share * softplus(-margins)).sum() + STRENGTH * weights[:-1].square().sum() / 2
        total.backward()
        return total

    optimizer.step(loss)
    return weights.detach()


def density_ratio(likely: Tensor, good: Tensor, least: float, most: float) -> Tensor:
    """Return p / (1 − p) of bad rows within bounds, and 1 of good ones."""
    ratio = (likely / (1 - likely + 1e-8)).clamp(least, most)
    return torch.where(good, 1.0, ratio)


def _balanced(likely: Tensor, good: Tensor) -> Tensor:
    """Return the share of rows that are told right, both sides counting alike; one half is by chance."""
    right = ((likely > 0.5) == good).double()
    return (right[good].mean() + right[~good].mean()) / 2


def _require(rows: Sequence[dict[str, Any]], column: str) -> None:
    """Refuse rows that cannot be weighed.

    Raises:
        DataError: All are on one side, or one has the column already.
    """
    if len({row["label"] for row in rows}) < 2:
        raise DataError(
            "prompts of good and bad answers cannot be compared",
            found=f"{len(rows)} rows, all of one side",
            expected="good and bad answers",
        )
    for number, row in enumerate(rows, 1):
        if column in row:
            raise DataError(
                f"there is a column `{column}` already", where=f"row {number}", fix="choose another `column`"
            )


def _prompt(row: dict[str, Any], policy: Policy, limit: int | None) -> list[int]:
    """Return the tokens that stand before a row's answer, the last ones where there are too many."""
    tokens = list(policy.encoder.encode_prompt(row["prompt"], tools_of(row), arguments_of(row)))
    longest = limit or policy.artifact.facts.context
    return tokens if longest is None else tokens[-longest:]


def _batches(prompts: Sequence[Sequence[int]], budget: int) -> Iterator[list[int]]:
    """Yield rows of similar lengths, so many at a time as fit; the longest first."""
    part: list[int] = []
    for row in sorted(range(len(prompts)), key=lambda row: -len(prompts[row])):
        if part and len(prompts[part[0]]) * (len(part) + 1) > budget:
            yield part
            part = []
        part.append(row)
    if part:
        yield part
