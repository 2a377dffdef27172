"""What is measured: models, shapes of data, and the settings of TRL that are tried. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from objectives import OBJECTIVES

LORA = {"r": 8, "alpha": 16}


@dataclass(frozen=True)
class Shape:
    """A decoder of the Llama kind with tied embeddings, float32."""

    layers: int
    width: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int

    @property
    def body(self) -> int:
        """Parameters of the matrices below the head."""
        values = self.width // self.heads * self.kv_heads
        attention = 2 * self.width * self.width + 2 * self.width * values
        return self.layers * (attention + 3 * self.width * self.intermediate)

    @property
    def parameters(self) -> int:
        """All of them; embeddings and head are one matrix."""
        return self.body + (2 * self.layers + 1) * self.width + self.vocabulary * self.width


@dataclass(frozen=True)
class Lengths:
    """Tokens of a text: log-normal around `median`, within `least` and `most`."""

    median: int
    spread: float
    least: int
    most: int


@dataclass(frozen=True)
class Scenario:
    """One shape of training.

    Args:
        name: How it is asked for.
        model: The policy.
        prompt: Its lengths.
        answer: Its lengths, end token included; of both sides of a pair alike.
        batch: Examples of an optimizer step by objective, of those that are measured in this shape; a preference
            example has two sequences.
        lora: Train adapters on all linear layers but the head.
        targets: Least ratio wanted by objective, against TRL's fastest setting.
        memory: Largest ratio wanted of the peaks of memory, where the objective is held to the shape's.
        main: Is it one of the table's four?
    """

    name: str
    model: Shape
    prompt: Lengths
    answer: Lengths
    batch: Mapping[str, int]
    lora: bool = False
    targets: Mapping[str, float] = field(default_factory=dict)
    memory: float = 1.0
    main: bool = False

    def ratio(self, objective: str) -> float:
        """Least ratio of times wanted: never to be slower, unless more is wanted."""
        return self.targets.get(objective, 1.0)

    def share(self, objective: str) -> float:
        """Largest ratio wanted of the peaks of memory."""
        return self.memory if OBJECTIVES[objective].memory else 1.0

    def described(self) -> dict[str, Any]:
        """Return it as JSON."""
        return asdict(self)


M17 = Shape(6, 256, 768, 8, 4, 49_152)
SMALL = Shape(5, 128, 384, 4, 2, 64)


def _with_vocabulary(size: int) -> Shape:
    return Shape(6, 256, 768, 8, 4, size)


def _all(batch: int) -> dict[str, int]:
    return dict.fromkeys(OBJECTIVES, batch)


SHORT_PROMPT = Lengths(60, 0.55, 16, 250)
SHORT_ANSWER = Lengths(14, 0.35, 5, 40)
FAR = {"sft": 6.0, "dpo": 8.0, "kto": 5.0, "orpo": 5.0, "cpo": 5.0, "reward": 1.5}
"""Wanted where most tokens are those of prompts."""
NEAR = {"sft": 1.5, "dpo": 1.5}

SCENARIOS: Mapping[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario("short-answers", M17, SHORT_PROMPT, SHORT_ANSWER, _all(8), targets=FAR, memory=0.35, main=True),
        Scenario("long-answers", M17, Lengths(38, 0.3, 16, 90), Lengths(390, 0.3, 150, 800), _all(8), targets=NEAR,
                 memory=0.6, main=True),
        Scenario("long-prompts", M17, Lengths(390, 0.25, 200, 700), Lengths(20, 0.3, 8, 40), _all(4), targets=FAR,
                 memory=0.35, main=True),
        Scenario("small-vocabulary", SMALL, Lengths(20, 0.25, 10, 32), Lengths(10, 0.3, 4, 20), _all(64),
                 targets=NEAR, memory=1.0, main=True),
        Scenario("even-halves", M17, Lengths(140, 0.4, 40, 400), Lengths(140, 0.4, 40, 400), {"sft": 16, "dpo": 8}),
        Scenario("one-row", M17, Lengths(180, 0.3, 80, 400), Lengths(60, 0.4, 20, 150), {"sft": 1, "dpo": 1}),
        Scenario("many-tiny-rows", M17, Lengths(24, 0.4, 8, 60), Lengths(8, 0.4, 3, 20), {"sft": 64, "dpo": 32}),
        Scenario("all-supervised", _with_vocabulary(32_000), Lengths(2, 0.0, 2, 2), Lengths(250, 0.5, 40, 600),
                 {"sft": 8, "dpo": 4}),
        Scenario("small-subwords", _with_vocabulary(8_192), Lengths(60, 0.5, 16, 250), Lengths(200, 0.5, 30, 500),
                 {"sft": 8, "dpo": 4}),
        Scenario("large-vocabulary", _with_vocabulary(128_256), SHORT_PROMPT, SHORT_ANSWER, {"sft": 8, "dpo": 4}),
        Scenario("lora-short-answers", M17, SHORT_PROMPT, SHORT_ANSWER, {"sft": 8, "dpo": 8}, lora=True),
        Scenario("lora-even-halves", M17, Lengths(140, 0.4, 40, 400), Lengths(140, 0.4, 40, 400),
                 {"sft": 16, "dpo": 8}, lora=True),
    )
}  # fmt: skip

VOCABULARIES = (32_768, 131_072, 262_144)
"""Where posttrain's peak of memory is held against what it cannot do without."""
ROW_COUNTS = (1_000, 10_000, 100_000)

DEFAULT = "default"
"""TRL as it comes, in float32: one forward pass over the whole batch, gradient checkpointing on."""


def trl_grid(objective: str, batch: int) -> dict[str, dict[str, Any]]:
    """Return the settings of TRL that are tried, by name, all of which run on a CPU and train the same loss.

    `unordered` settings choose which rows make a step themselves; they are timed by the epoch.
    """
    least = LEAST.get(objective, 1)
    splits = [size for size in (batch, batch // 2, batch // 4, 1) if size >= least and batch % size == 0]
    grid: dict[str, dict[str, Any]] = {DEFAULT: _split(batch, 1) | {"gradient_checkpointing": True}}
    for size in dict.fromkeys(splits):
        grid[f"{size}x{batch // size}"] = _split(size, batch // size)
    plain = _split(batch, 1)
    if batch > 1 and objective not in IN_ORDER:
        grid["grouped by length"] = plain | {
            "train_sampling_strategy": "group_by_length", "unordered": True
        }  # fmt: skip
    if objective not in PADDED_AS_IS:
        grid["padded to 32"] = plain | {"pad_to_multiple_of": 32}
    grid["eager attention"] = plain | {"attention": "eager"}
    more = MORE.get(objective)
    return grid | (more(batch, splits) if more else {})


LEAST = {"kto": 2}
"""Rows that a micro-batch of TRL needs: KTO estimates the KL divergence from those of one."""
IN_ORDER = ("kto",)
"""TRL takes rows in the order of the dataset only."""
PADDED_AS_IS = ("orpo", "cpo")
"""TRL pads to the longest row only."""


def _split(size: int, parts: int) -> dict[str, Any]:
    return {
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": parts,
        "gradient_checkpointing": False,
    }


def _padding_free(batch: int, splits: list[int]) -> dict[str, dict[str, Any]]:
    free = {"padding_free": True, "max_length": None}
    grid = {
        f"padding-free {size}x{batch // size}": _split(size, batch // size) | free
        for size in dict.fromkeys(splits)
        if size > 1
    }
    grid["packed"] = _split(1, 1) | {"packing": True, "unordered": True}
    return grid


def _reference_first(batch: int, splits: list[int]) -> dict[str, dict[str, Any]]:
    ahead = {"precompute_ref_log_probs": True}
    pairs = dict.fromkeys([*((size, size) for size in splits), (batch, 1), (splits[-1], batch)])
    return {
        f"{size}x{batch // size}, reference first by {scored}": _split(size, batch // size)
        | ahead
        | {"precompute_ref_batch_size": scored}
        for size, scored in pairs
    }


MORE = {"sft": _padding_free, "dpo": _reference_first, "kto": _reference_first}
"""Settings that only some of TRL's trainers have."""
