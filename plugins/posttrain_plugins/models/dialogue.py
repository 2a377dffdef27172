"""What the files of a model say about conversations: which template counts, what opens and what ends an answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.artifacts.fingerprint import Refusal
from posttrain_plugins.templates.encoder import CLOCK, Encoder
from posttrain_plugins.templates.tokenizer import TEMPLATE, read_json

_ANSWER = "Quite 7 well."
_TURNS: tuple[dict[str, str], ...] = (
    {"role": "user", "content": "Hello 5 there?"},
    {"role": "assistant", "content": _ANSWER},
)


def overruled(directory: Path) -> tuple[str, ...]:
    """Return the files with another chat template than the one that counts, which a tool may take instead."""
    found = _sources(directory)
    counts = next(iter(found.values()), None)
    return tuple(name for name, source in found.items() if source != counts)


def forget_overruled(directory: Path) -> None:
    """Remove the templates that do not count: whoever set another one has decided."""
    for name in overruled(directory):
        config = {key: value for key, value in read_json(directory / name).items() if key != "chat_template"}
        (directory / name).write_text(
            json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )


def _sources(directory: Path) -> dict[str, str]:
    """Return every default chat template by its file, the one that counts first."""
    file = directory / TEMPLATE
    found = {TEMPLATE: file.read_text(encoding="utf-8") if file.is_file() else None}
    for name in ("chat_template.json", "tokenizer_config.json"):
        found[name] = _default(read_json(directory / name).get("chat_template"))
    return {name: source.strip() for name, source in found.items() if source is not None}


def _default(value: Any) -> str | None:
    if isinstance(value, list):
        value = next((each.get("template") for each in value if each.get("name") == "default"), None)
    return value if isinstance(value, str) else None


def opens(encoder: Encoder) -> bool | None:
    """Whether the generation prompt leads up to an answer as a whole conversation does; None without a template.

    Templates whose answers follow the prompt at once have no generation prompt and need none.
    """
    template = encoder.template
    if template is None:
        return None
    try:
        whole = template.render(_TURNS, False, None, CLOCK)
        bare = template.render(_TURNS[:1], False, None, CLOCK)
        opened = template.render(_TURNS[:1], True, None, CLOCK)
    except Refusal:
        return None
    at = whole.find(_ANSWER)
    if at < 0 or not whole.startswith(bare):
        return None
    return opened != bare or not whole[len(bare) : at].strip()


def declared_eos(encoder: Encoder) -> tuple[int, ...]:
    """Return the ids at which other tools stop: of the generation config, else of the config, else the tokenizer's."""
    for source in (encoder.generation, encoder.config):
        if (found := _ids(source)) is not None:
            return found
    return () if encoder.eos_id is None else (encoder.eos_id,)


def _ids(source: Mapping[str, Any]) -> tuple[int, ...] | None:
    value = source.get("eos_token_id")
    if value is None:
        return None
    return tuple(sorted(value)) if isinstance(value, list) else (int(value),)
