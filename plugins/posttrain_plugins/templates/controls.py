"""Control tokens: which there are, where messages spell them, and how such text is encoded as plain text.

A control token is a special token, or an added token that the chat template itself writes. A message that spells one
must not become one: a user could end the assistant's turn. What the assistant itself says may hold the template's
tokens that are not special, such as `<think>`, since a model produces them as tokens too.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from posttrain.errors import DataError
from posttrain_plugins.templates.atoms import Atom
from posttrain_plugins.templates.reading import Span
from posttrain_plugins.templates.tokenizer import TokenizerFiles

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_TAG = re.compile(r"</?[A-Za-z_]+>")


class Spelling:
    """Finds tokens in texts that rarely hold any.

    Args:
        tokens: The tokens.
    """

    def __init__(self, tokens: Sequence[str]) -> None:
        longest_first = sorted(tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._first = tuple(sorted({token[0] for token in tokens}))

    def spans(self, text: str) -> list[Span]:
        """Return where a text spells one of the tokens."""
        if not any(first in text for first in self._first):
            return []
        return [Span(*match.span()) for match in self._pattern.finditer(text)]


@dataclass
class Controls:
    """The control tokens of a tokenizer with a chat template.

    Args:
        files: The tokenizer files.
    """

    files: TokenizerFiles

    @cached_property
    def others(self) -> Spelling:
        """What messages of others must not spell."""
        return Spelling(sorted({*self._special, *self._written}))

    @cached_property
    def own(self) -> Spelling:
        """What messages of the assistant must not spell."""
        return Spelling(sorted(self._special))

    def of(self, role: Any) -> Spelling:
        """Return what messages of a role must not spell."""
        return self.own if role == "assistant" else self.others

    def atoms(self, text: str) -> list[Atom]:
        """Return the added tokens of a text that are not blank, without those that any text may come to hold."""
        encoding = self.files.plain.encode(text, add_special_tokens=False)
        pairs = zip(encoding.ids, encoding.offsets, strict=True)
        name, added = self.files.plain.id_to_token, self.files.added
        found = [
            (token, start, end)
            for token, (start, end) in pairs
            if token in added and name(token) not in self._made
        ]
        return [
            Atom(
                start,
                end,
                token in self.files.special or not _TAG.fullmatch(text[start:end].strip()),
                _without_blanks(text, Span(start, end)),
            )
            for token, start, end in found
            if text[start:end].strip()
        ]

    def encode(self, text: str, spelled: Sequence[Span]) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokenize a text whose `spelled` parts, in order and apart, are plain text.

        Added tokens split a text before anything else happens to it, so the stretches between those that stay are
        tokenized one by one, by the tokenizer without control tokens.

        Returns:
            The ids, and the characters that each stands for.

        Raises:
            DataError: The tokenizer makes a control token of plain text.
        """
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        for start, end, token in self._stretches(text, spelled):
            if token is not None:
                ids.append(token)
                offsets.append((start, end))
                continue
            tokenizer = self._inside if start else self._beginning
            encoding = tokenizer.encode(text[start:end], add_special_tokens=False)
            ids += encoding.ids
            offsets += [(start + first, start + last) for first, last in encoding.offsets]
            self._require_plain(encoding.ids, text[start:end])
        return ids, offsets

    def _stretches(self, text: str, spelled: Sequence[Span]) -> Iterator[tuple[int, int, int | None]]:
        """Yield the parts of a text in order: those between tokens that stay, and these with their ids."""
        encoding = self.files.plain.encode(text, add_special_tokens=False)
        ends = [span.end for span in spelled]
        at = 0
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            name = self.files.plain.id_to_token(token)
            stays = token in self.files.added and (name not in self._made or name == text[start:end])
            ahead = bisect_right(ends, start)
            if stays and (ahead == len(ends) or end <= spelled[ahead].start):
                if at < start:
                    yield at, start, None
                yield start, end, token
                at = end
        if at < len(text):
            yield at, len(text), None

    def _require_plain(self, ids: Sequence[int], text: str) -> None:
        made = self._ids.intersection(ids)
        if made:
            names = ", ".join(sorted(str(self.files.plain.id_to_token(token)) for token in made))
            raise DataError(
                "a message spells a control token, and the tokenizer makes that token of plain text too",
                found=f"{names} in {text[:80]!r}",
                fix="take the token out of the message",
            )

    @cached_property
    def _added(self) -> dict[str, bool]:
        """The added tokens that are not blank, and whether they are special."""
        added = self.files.definition.get("added_tokens") or ()
        return {token["content"]: bool(token["special"]) for token in added if token["content"].strip()}

    @cached_property
    def _special(self) -> set[str]:
        return {content for content, special in self._added.items() if special}

    @cached_property
    def _written(self) -> set[str]:
        """The added tokens whose text stands in the chat template."""
        template = self.files.template or ""
        return {content for content in self._added if content in template}

    @cached_property
    def _ids(self) -> frozenset[int]:
        names = (self._special | self._written) - self._made
        added = self.files.definition.get("added_tokens") or ()
        return frozenset(token["id"] for token in added if token["content"] in names)

    @cached_property
    def _made(self) -> frozenset[str]:
        """The tokens that stand for characters which the vocabulary lacks: any text may come to hold them."""
        model = self.files.definition.get("model") or {}
        made = {f"<0x{byte:02X}>" for byte in range(256)} if model.get("byte_fallback") else set()
        if model.get("unk_id") is not None:
            made.add(model["vocab"][model["unk_id"]][0])
        elif model.get("unk_token") is not None:
            made.add(model["unk_token"])
        roles = self.files.special_tokens.items()
        return frozenset(made.difference(token for role, token in roles if role != "unk_token"))

    @cached_property
    def _beginning(self) -> Tokenizer:
        return self.files.without(self._special | self._written, beginning=True)

    @cached_property
    def _inside(self) -> Tokenizer:
        return self.files.without(self._special | self._written, beginning=False)


def _without_blanks(text: str, span: Span) -> Span:
    inner = text[span.start : span.end]
    start = span.start + len(inner) - len(inner.lstrip())
    return Span(start, start + len(inner.strip()))
