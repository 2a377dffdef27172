"""Secrets: references only, and nothing of them in what is written down."""

from __future__ import annotations

import base64
import json
from urllib.parse import quote

import pytest

from posttrain.errors import SpecError
from posttrain.planning.secrets import REDACTED, Redactor, looks_like_secret, resolve

HF = "hf_" + "aB3dE6gH9j" * 3
CANARY = "c4n/ary+se cret&value"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("token", "abcd1234"),
        ("HF_TOKEN", "abcd1234"),
        ("hub_token", "x1y2z3"),
        ("apiKey", "abc"),
        ("api_key", "abc"),
        ("OPENAI_API_KEY", "abc"),
        ("password", "hunter2"),
        ("client_secret", "s"),
        ("AWS_SECRET_ACCESS_KEY", "s"),
        ("authorization", "abc"),
        ("credentials", "abc"),
        ("access_tokens", "abcdef"),
        ("note", HF),
        ("args", f"--token={HF}"),
        ("x", "sk-proj-abc123def456ghi789jkl"),
        ("x", "AKIA" + "A1B2" * 4),
        ("x", "ghp_" + "a1" * 18),
        ("url", "https://me:pw@host/x"),
        ("header", "Bearer abcdef123456"),
    ],
)
def test_secrets_are_noticed(key: str, value: str) -> None:
    assert looks_like_secret(key, value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("eos_token", "<|im_end|>"),
        ("pad_token", "[PAD]"),
        ("pad_token", "endoftext"),
        ("stop_token", "END"),
        ("max_tokens", 512),
        ("max_new_tokens", "512"),
        ("reduction", "token_mean"),
        ("token_mean", "yes"),
        ("tokenizer", "org/model"),
        ("special_tokens", "begin"),
        ("token", "<answer>"),
        ("key", "seed"),
        ("token_budget", "4096"),
        ("micro_batch_tokens", "4096"),
        ("token", "env:HF_TOKEN"),
        ("password", ""),
        ("loss", "sigmoid"),
        ("TOKENIZERS_PARALLELISM", "false"),
        ("secret_santa_path", "a.json"),
        ("x", "hf_internal"),
        ("id", "hf-internal-testing/tiny-random-gpt2"),
        ("x", "risk-averse-learning-objective-2"),
        ("url", "https://h/a@b"),
        ("url", "ssh://git@host/x"),
        ("prompt", "the bearer of this letter"),
        ("key", "answer"),
        ("public_key", "abc"),
    ],
)
def test_ordinary_options_are_no_secrets(key: str, value: object) -> None:
    assert not looks_like_secret(key, value)


def test_resolve_reads_the_environment_and_repeats_no_value() -> None:
    assert resolve("env:T", {"T": "v"}) == "v"
    for reference, environ in [("env:T", {}), ("env:T", {"T": ""})]:
        with pytest.raises(SpecError, match="T"):
            resolve(reference, environ)
    with pytest.raises(SpecError) as caught:
        resolve("literal-value", {})
    assert "literal-value" not in str(caught.value)


@pytest.mark.parametrize(
    "spelling",
    [
        CANARY,
        quote(CANARY, safe=""),
        quote(CANARY, safe="").lower().replace("c4n%2fary", "c4n%2fary"),
        json.dumps(CANARY)[1:-1],
        base64.b64encode(CANARY.encode()).decode(),
        base64.urlsafe_b64encode(CANARY.encode()).decode(),
    ],
)
def test_known_values_go_in_every_spelling(spelling: str) -> None:
    assert Redactor([CANARY]).text(f"a {spelling} b") == f"a {REDACTED} b"


@pytest.mark.parametrize("prefix", ["", "u", "us", "use:", "user:"])
def test_base64_around_a_value_is_redacted(prefix: str) -> None:
    encoded = base64.b64encode(f"{prefix}{CANARY}:end".encode()).decode()
    clean = Redactor([CANARY]).text(encoded)
    assert REDACTED in clean
    kept = clean.replace(REDACTED, "")
    assert len(kept) < len(encoded) - len(CANARY)


def test_the_longer_of_two_values_goes_first() -> None:
    assert Redactor(["secret", "secret-longer"]).text("secret-longer") == REDACTED


def test_short_values_stay() -> None:
    assert Redactor(["abc"]).text("abc abc") == "abc abc"


def test_unknown_secrets_go_by_their_shape() -> None:
    redact = Redactor().text
    assert redact("get https://me:pw@host/x?y") == f"get https://{REDACTED}@host/x?y"
    assert redact("Authorization: Bearer abc.def") == f"Authorization: Bearer {REDACTED}"
    assert redact('{"authorization": "Basic dTpw"}') == f'{{"authorization": "Basic {REDACTED}"}}'
    assert HF not in redact(f"token {HF}")
    assert redact("https://host/path@v1 and a: b") == "https://host/path@v1 and a: b"


def test_values_in_json_are_redacted_with_their_keys() -> None:
    data = {"a": [CANARY, 1, None], CANARY: {"api_key": "short"}, "eos_token": "</s>", "t": (True, CANARY)}
    assert Redactor([CANARY]).value(data) == {
        "a": [REDACTED, 1, None],
        REDACTED: {"api_key": REDACTED},
        "eos_token": "</s>",
        "t": [True, REDACTED],
    }
