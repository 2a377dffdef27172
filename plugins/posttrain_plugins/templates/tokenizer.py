"""The tokenizer files of a model directory, read without `transformers`."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.artifacts.manifest import digest_of
from posttrain.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER = "tokenizer.json"
TEMPLATE = "chat_template.jinja"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SEMANTIC = ("model", "normalizer", "pre_tokenizer", "post_processor")
_ADDED = ("id", "content", "single_word", "lstrip", "rstrip", "normalized", "special")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty one when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"the file is not valid JSON: {error}", where=str(path)) from error
    if not isinstance(value, dict):
        raise DataError("the file does not hold a JSON object", where=str(path), found=type(value).__name__)
    return value


@dataclass(frozen=True)
class TokenizerFiles:
    """What the tokenizer files of a directory say.

    Args:
        definition: The content of `tokenizer.json`.
        config: The content of `tokenizer_config.json`.
        special_tokens: Names such as `eos_token` to their text.
        template: Source of the default chat template, or None.
    """

    definition: Mapping[str, Any]
    config: Mapping[str, Any]
    special_tokens: Mapping[str, str]
    template: str | None

    @classmethod
    def read(cls, directory: Path) -> TokenizerFiles:
        """Read the files.

        Raises:
            DataError: There is no `tokenizer.json`, or a file is malformed.
        """
        definition = read_json(directory / TOKENIZER)
        if not definition:
            raise DataError(
                f"the model directory has no `{TOKENIZER}`",
                where=str(directory),
                fix="load the model with `model.load`, which writes one",
            )
        config = read_json(directory / "tokenizer_config.json")
        special = _special_tokens({**read_json(directory / "special_tokens_map.json"), **_present(config)})
        return cls(definition, config, special, chat_template(directory))

    @cached_property
    def hash(self) -> str:
        """Hash of what decides the ids: vocabulary, merges, added tokens, normalization, splitting."""
        parts: dict[str, Any] = {name: self.definition.get(name) for name in _SEMANTIC}
        model = dict(parts["model"] or {})
        if "merges" in model:
            model["merges"] = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        added = [
            {key: token.get(key) for key in _ADDED} for token in self.definition.get("added_tokens") or ()
        ]
        return digest_of(
            {**parts, "model": model, "added_tokens": sorted(added, key=lambda token: token["id"])}
        )

    @cached_property
    def plain(self) -> Tokenizer:
        """The tokenizer without post-processing, padding and truncation.

        A post-processor adds special tokens, and a byte-level one moves offsets past leading spaces, so that
        a token would seem to start after a space that it holds.
        """
        return self._tokenizer({"post_processor": None, "padding": None, "truncation": None})

    @cached_property
    def continuation(self) -> Tokenizer:
        """`plain` without the space that some tokenizers put before a text: for what follows other text."""
        parts = {name: _without_space(self.definition.get(name)) for name in ("normalizer", "pre_tokenizer")}
        return self._tokenizer({"post_processor": None, "padding": None, "truncation": None, **parts})

    def without(self, tokens: Collection[str], beginning: bool) -> Tokenizer:
        """Return `plain` without some of the added tokens.

        Args:
            tokens: Their contents.
            beginning: Whether what it is given begins a text; else it gets no space that only beginnings get.
        """
        added = [
            token for token in self.definition.get("added_tokens") or () if token["content"] not in tokens
        ]
        parts = {"post_processor": None, "padding": None, "truncation": None, "added_tokens": added}
        if not beginning:
            parts["pre_tokenizer"] = _without_first_space(self.definition.get("pre_tokenizer"))
        return self._tokenizer(parts)

    @cached_property
    def prefix(self) -> tuple[int, ...]:
        """Ids that the tokenizer puts before a text on its own account (a beginning-of-sequence token)."""
        bos = self.token_id("bos_token")
        wanted = self.config.get("add_bos_token")
        if wanted is not None:
            return (bos,) if wanted and bos is not None else ()
        # Of an empty text nothing tells what stands before it from what stands behind it.
        text = self.plain.encode("a", add_special_tokens=False).ids
        ids = self._tokenizer({"padding": None, "truncation": None}).encode("a").ids
        return (bos,) if bos is not None and ids[: len(text) + 1] == [bos, *text] else ()

    def prefixed(self, ids: Sequence[int]) -> list[int]:
        """Return ids behind `prefix`, unless they begin with it."""
        prefix = self.prefix
        return list(ids) if tuple(ids[: len(prefix)]) == prefix else [*prefix, *ids]

    @cached_property
    def added(self) -> frozenset[int]:
        """Ids of the added tokens: those the tokenizer never makes by merging."""
        return frozenset(token["id"] for token in self.definition.get("added_tokens") or ())

    @cached_property
    def special(self) -> frozenset[int]:
        """Ids of the special tokens, which decoding leaves out."""
        return frozenset(
            token["id"] for token in self.definition.get("added_tokens") or () if token["special"]
        )

    @cached_property
    def reachable(self) -> int:
        """One more than the highest id that a text, the chat template or a named special token gives.

        Special tokens that neither the template writes nor the config names are left out: messages that spell
        one are encoded as plain text. Some models reserve such a token and have no embedding for it.
        """
        named = {*self.special_tokens.values()}
        idle = {
            token["id"]
            for token in self.definition.get("added_tokens") or ()
            if token["special"]
            and token["content"] not in named
            and token["content"] not in (self.template or "")
        }
        ids = self.plain.get_vocab(with_added_tokens=True).values()
        return 1 + max((id for id in ids if id not in idle), default=-1)

    def token_id(self, name: str) -> int | None:
        """Return the id of a special token such as `pad_token`, or None when there is none."""
        text = self.special_tokens.get(name)
        if text is None:
            return None
        found: int | None = self.plain.token_to_id(text)
        return found

    def _tokenizer(self, changes: Mapping[str, Any]) -> Tokenizer:
        from tokenizers import Tokenizer

        return Tokenizer.from_str(json.dumps({**self.definition, **changes}, ensure_ascii=False))


_NO_SPACE: Mapping[str, Mapping[str, Any] | None] = {
    "Prepend": None,
    "Metaspace": {"prepend_scheme": "never"},
    "ByteLevel": {"add_prefix_space": False},
}


def _without_space(part: Any) -> Any:
    """Return a normalizer or pre-tokenizer that puts nothing before a text."""
    if part is None:
        return None
    changes = _NO_SPACE.get(part["type"], {})
    if changes is None:
        return None
    steps = {
        name: [step for step in map(_without_space, part[name]) if step is not None]
        for name in ("normalizers", "pretokenizers")
        if name in part
    }
    return {**part, **changes, **steps}


def _without_first_space(part: Any) -> Any:
    """Return a pre-tokenizer that puts no space before the first stretch of a text alone."""
    if part is None:
        return None
    steps = (
        {"pretokenizers": [_without_first_space(step) for step in part["pretokenizers"]]}
        if "pretokenizers" in part
        else {}
    )
    first = {"prepend_scheme": "never"} if part.get("prepend_scheme") == "first" else {}
    return {**part, **first, **steps}


def _present(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in _SPECIAL:
        value = config.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str):
            found[name] = text
    return found


def chat_template(directory: Path) -> str | None:
    """Return the default chat template of a model directory, from whichever file holds it, or None.

    Raises:
        DataError: There are several and none is the default, or a file is malformed.
    """
    file = directory / TEMPLATE
    if file.is_file():
        return file.read_text(encoding="utf-8")
    config = read_json(directory / "tokenizer_config.json")
    inline = read_json(directory / "chat_template.json").get("chat_template", config.get("chat_template"))
    if inline is None or isinstance(inline, str):
        return inline
    named = {str(entry.get("name")): entry.get("template") for entry in inline}
    if "default" in named:
        return str(named["default"])
    raise DataError(
        "the model has several chat templates and none is called `default`",
        where=str(directory),
        found=", ".join(sorted(named)),
        fix="write the one you want to `chat_template.jinja`",
    )
