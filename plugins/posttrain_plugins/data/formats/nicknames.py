"""What trainers, and other tools, call the rows that they take."""

from __future__ import annotations

from collections.abc import Mapping

_DEMONSTRATIONS = ("prompt_completion", "messages")
_PAIRS = ("preference",)
_VERDICTS = ("unpaired_preference",)
_ASKED = ("prompt",)

NICKNAMES: Mapping[str, tuple[str, ...]] = {
    "sft": _DEMONSTRATIONS,
    "instruction": _DEMONSTRATIONS,
    "completion": ("prompt_completion",),
    "conversation": ("messages",),
    "conversational": ("messages",),
    "conversations": ("messages",),
    "chat": ("messages",),
    "chatml": ("messages",),
    "language_modeling": ("text", "messages"),
    "lm": ("text",),
    "dpo": _PAIRS,
    "orpo": _PAIRS,
    "cpo": _PAIRS,
    "ipo": _PAIRS,
    "simpo": _PAIRS,
    "pairs": _PAIRS,
    "paired": _PAIRS,
    "pairwise": _PAIRS,
    "paired_preference": _PAIRS,
    "kto": _VERDICTS,
    "bco": _VERDICTS,
    "unpaired": _VERDICTS,
    "binary": _VERDICTS,
    "tpo": ("three_way",),
    "triple_preference": ("three_way",),
    "reward": ("preference", "scored", "ranked"),
    "reward_model": ("preference", "scored", "ranked"),
    "rm": ("preference", "scored", "ranked"),
    "rating": ("scored",),
    "regression": ("scored",),
    "ranking": ("ranked",),
    "prm": ("stepwise",),
    "stepwise_supervision": ("stepwise",),
    "steps": ("stepwise",),
    "prompt_only": _ASKED,
    "prompts": _ASKED,
    "grpo": _ASKED,
    "rloo": _ASKED,
    "ppo": _ASKED,
    "online_dpo": _ASKED,
}
"""Formats by what trainers and other tools call them, the likeliest first."""


def meant(name: str, known: tuple[str, ...]) -> str | None:
    """Return the fix for an unknown format: those that a name probably means, if any.

    Args:
        name: Such as `kto`, `train.dpo` or `prompt-only`.
        known: The formats that there are.
    """
    from posttrain.wording import nearest

    plain = name.strip().lower().removeprefix("train.").replace("-", "_").replace(" ", "_")
    near = nearest(plain, (*known, *NICKNAMES))
    word = plain if plain in known or plain in NICKNAMES else near
    if word is None:
        return None
    found = [each for each in ((word,) if word in known else NICKNAMES[word]) if each in known]
    return f"did you mean {' or '.join(f'`{each}`' for each in found)}?" if found else None
