"""Secrets: referenced as `env:NAME` in a spec, resolved where they are needed, never written down."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote, quote_plus

from posttrain.errors import SpecError

REDACTED = "[redacted]"
SHORTEST = 6
"""Shorter values are not redacted: they occur by chance in ordinary text."""

_REFERENCE = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]*")

_SHAPES = re.compile(
    r"""(?<![A-Za-z0-9_])(?:
        hf_[A-Za-z0-9]{20,}
      | gh[pousr]_[A-Za-z0-9]{20,}
      | github_pat_[A-Za-z0-9_]{20,}
      | glpat-[A-Za-z0-9_-]{16,}
      | sk-(?=[A-Za-z_-]*[0-9])[A-Za-z0-9_-]{20,}
      | (?:AKIA|ASIA)[0-9A-Z]{16}
      | AIza[A-Za-z0-9_-]{30,}
      | xox[abeprs]-[A-Za-z0-9-]{10,}
      | eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*
      | -----BEGIN[A-Z ]*\ PRIVATE\ KEY-----(?:[^-]*-----END[A-Z ]*\ PRIVATE\ KEY-----)?
    )""",
    re.VERBOSE,
)
_USERINFO = re.compile(r"(?<=://)[^\s/?#@\"'<>]*:[^\s/?#\"'<>]*(?=@)|(?<=://)[^\s/?#@:\"'<>]{16,}(?=@)")
_AUTHORIZATION = re.compile(
    r"(?P<header>\bauthorization[\"']?\s*[:=]\s*[\"']?)(?P<scheme>(?:bearer|basic|token)\s+)?[^\s\"',;]+",
    re.IGNORECASE,
)
_BEARER = re.compile(
    r"(?P<scheme>\bbearer\s+)(?=[^\s\"',;]*[0-9]|[^\s\"',;]{16})[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE
)

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SECRET_WORDS = frozenset(
    {"secret", "password", "passwd", "passphrase", "apikey", "authorization", "credential"}
)
_KEY_OWNERS = frozenset({"api", "access", "secret", "private", "account", "signing", "encryption"})
_TOKEN_OWNERS = frozenset(
    {
        "access",
        "api",
        "auth",
        "bearer",
        "bot",
        "gh",
        "github",
        "gitlab",
        "hf",
        "hub",
        "huggingface",
        "id",
        "login",
    }
    | {"mlflow", "oauth", "personal", "refresh", "registry", "session", "tracking", "wandb"}
)
_TOKEN_ROLES = frozenset(
    {
        "answer",
        "assistant",
        "audio",
        "begin",
        "bos",
        "cls",
        "decoder",
        "end",
        "eos",
        "eot",
        "extra",
        "first",
        "image",
    }
    | {
        "last",
        "mask",
        "next",
        "pad",
        "padding",
        "per",
        "prompt",
        "reward",
        "sep",
        "separator",
        "special",
        "start",
    }
    | {"step", "stop", "system", "think", "tool", "turn", "unk", "unknown", "user", "video", "vision"}
)


def is_reference(value: object) -> bool:
    """Whether `value` is an `env:NAME` reference."""
    return isinstance(value, str) and _REFERENCE.fullmatch(value) is not None


def resolve(reference: str, environ: Mapping[str, str]) -> str:
    """Return what the environment variable behind `env:NAME` holds.

    Raises:
        SpecError: It is no reference (its text is then not repeated), or the variable is missing or empty.
    """
    if not is_reference(reference):
        raise SpecError(
            "this is no reference to a secret", expected="env:NAME", fix="name an environment variable"
        )
    name = reference.removeprefix("env:")
    value = environ.get(name)
    if not value:
        state = "not set" if value is None else "empty"
        raise SpecError(
            f"the secret {reference} is {state}", where=reference, fix=f"set the environment variable {name}"
        )
    return value


def looks_like_secret(key: str, value: object) -> bool:
    """Whether `value`, written under `key` in a spec, seems to be a literal secret.

    Either the key says so (`api_key`, `HF_TOKEN`) or the value has the shape of a well-known token. Keys that
    name tokens of a vocabulary (`eos_token`, `max_tokens`, `token_mean`) do not count, nor does `<|end|>`.
    """
    if not isinstance(value, str) or not value or is_reference(value):
        return False
    return has_secret_shape(value) or _names_secret(key, value)


def has_secret_shape(text: str) -> bool:
    """Whether `text` contains a well-known kind of token, a URL with a password or a bearer token."""
    return any(pattern.search(text) for pattern in (_SHAPES, _USERINFO, _BEARER))


def _names_secret(key: str, value: str) -> bool:
    words = [word.lower() for word in _WORDS.findall(key)]
    if not words:
        return False
    before, plural = set(words[:-1]), words[-1].endswith("s")
    last = words[-1].removesuffix("s") if plural else words[-1]
    if last in _SECRET_WORDS:
        return True
    if last == "key":
        return bool(before & _KEY_OWNERS)
    if last != "token":
        return False
    if before & _TOKEN_OWNERS and not before & _TOKEN_ROLES:
        return True
    return not plural and not before & _TOKEN_ROLES and not _is_vocabulary(value)


def _is_vocabulary(value: str) -> bool:
    """Whether `value` may be a token of a vocabulary: bracketed, short, or a piece of text."""
    return len(value) <= 3 or value[0] in "<[" or any(character.isspace() for character in value)


class Redactor:
    """Removes secrets from what is logged, recorded or shown.

    Known values go in every spelling they travel in (plain, URL-quoted, JSON-escaped, base64 at any
    offset); URL passwords, authorization headers and well-known shapes of tokens go too.

    Args:
        values: The secrets this process knows. Those of fewer than 6 characters are ignored.
    """

    def __init__(self, values: Iterable[str] = ()) -> None:
        spellings = {spelling for value in values if len(value) >= SHORTEST for spelling in _spellings(value)}
        longest_first = sorted(spellings, key=lambda spelling: (-len(spelling), spelling))
        self._known = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def text(self, text: str) -> str:
        """Return `text` without secrets."""
        if self._known is not None:
            text = self._known.sub(REDACTED, text)
        if "://" in text:
            text = _USERINFO.sub(REDACTED, text)
        text = _AUTHORIZATION.sub(lambda match: f"{match['header']}{match['scheme'] or ''}{REDACTED}", text)
        text = _BEARER.sub(lambda match: f"{match['scheme']}{REDACTED}", text)
        return _SHAPES.sub(REDACTED, text)

    def value(self, value: Any) -> Any:
        """Return JSON-like `value` with every string in it redacted, keys included."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self._key(key): self._under(key, item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return value

    def _key(self, key: Any) -> Any:
        return self.text(key) if isinstance(key, str) else key

    def _under(self, key: Any, value: Any) -> Any:
        return REDACTED if looks_like_secret(str(key), value) else self.value(value)


def _spellings(value: str) -> set[str]:
    quoted = {quote(value, safe=""), quote(value), quote_plus(value)}
    lower = {re.sub(r"%[0-9A-F]{2}", lambda match: match[0].lower(), text) for text in quoted}
    # Output is redacted line by line, so the lines of a value count by themselves.
    lines = {line.strip() for line in value.splitlines() if len(line.strip()) >= SHORTEST}
    return {value, json.dumps(value)[1:-1], *lines, *quoted, *lower, *_base64_spellings(value.encode())}


def _base64_spellings(value: bytes) -> set[str]:
    """Return the encoding, and for each offset the characters that depend on `value` alone."""
    spellings = {base64.b64encode(value).decode(), base64.urlsafe_b64encode(value).decode()}
    for offset in range(3):
        encoded = base64.b64encode(b"\0" * offset + value).decode().rstrip("=")
        whole = (offset + len(value)) * 8 // 6
        core = encoded[(offset * 8 + 5) // 6 : whole]
        spellings |= {core, core.replace("+", "-").replace("/", "_")}
    return {spelling for spelling in spellings if len(spelling) >= SHORTEST}
