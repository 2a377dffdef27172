"""Tokenizing plain strings: one beginning, one end, and a boundary that no token lies across."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from posttrain.errors import DataError
from posttrain_plugins.templates.encoded import Encoded, masked
from posttrain_plugins.templates.reading import Span
from posttrain_plugins.templates.tokenizer import TokenizerFiles

if TYPE_CHECKING:
    from tokenizers import Encoding


@dataclass(frozen=True)
class Seams:
    """Tokenizes strings of one tokenizer.

    Args:
        files: The tokenizer files.
        end: The token that ends a text; None when there is none.
        where: What has the tokenizer, for errors.
    """

    files: TokenizerFiles
    end: int | None
    where: str

    def prompt(self, encoding: Encoding) -> Encoded:
        """Return a prompt: behind the tokenizer's own first token, nothing supervised."""
        tokens = self.files.prefixed(encoding.ids)
        return Encoded(tokens, [False] * len(tokens))

    def text(self, encoding: Encoding) -> Encoded:
        """Return a text that is supervised as a whole, with an end."""
        return self._closed(self._opened(encoding, Span(0, 0)))

    def pair(self, joined: Encoding, prompt: Encoding, completion: str, seam: int) -> Encoded:
        """Return a prompt with its completion: joined, or apart where joining changes the prompt's tokens.

        Args:
            joined: The tokens of both as one text.
            prompt: The tokens of the prompt alone, from which a generation starts.
            completion: The completion.
            seam: Where in the joined text it begins.
        """
        whole = self._opened(joined, Span(seam, seam))
        before = self.files.prefixed(prompt.ids)
        answer = [place >= len(before) for place in range(len(whole.tokens))]
        if whole.tokens[: len(before)] == before and whole.supervised == answer and not whole.straddling:
            return self._closed(whole)
        after = self.files.continuation.encode(completion, add_special_tokens=False).ids
        return self._closed(Encoded([*before, *after], [False] * len(before) + [True] * len(after)))

    def _opened(self, encoding: Encoding, seam: Span) -> Encoded:
        """Supervise what is behind a seam, and put the tokenizer's own first token before everything."""
        end = max((last for _, last in encoding.offsets), default=0)
        inside = masked(encoding.ids, encoding.offsets, (Span(seam.start, max(end, seam.end)),))
        tokens = self.files.prefixed(encoding.ids)
        supervised = [False] * (len(tokens) - len(encoding.ids)) + inside.supervised
        return Encoded(tokens, supervised, inside.straddling)

    def _closed(self, encoded: Encoded) -> Encoded:
        """Supervise an end token behind the tokens, unless they end with it."""
        if self.end is None:
            raise DataError(
                "the tokenizer has no end-of-sequence token, so the model would never learn to stop",
                where=self.where,
                fix="name `eos_token` in its `tokenizer_config.json`",
            )
        tokens, supervised = encoded.tokens, encoded.supervised
        if not tokens or tokens[-1] != self.end:
            tokens, supervised = [*tokens, self.end], [*supervised, True]
        return Encoded(tokens, supervised, encoded.straddling).without_first()
