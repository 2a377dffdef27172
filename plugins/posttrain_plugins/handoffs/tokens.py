"""End-of-sequence and padding tokens: a policy without the former never stops."""

from __future__ import annotations

from collections.abc import Iterable

from posttrain.contracts.rule import Site
from posttrain.contracts.stage import Certainty, Finding, Input, Level
from posttrain_plugins.handoffs.lineage import certainty, datasets, policies

NAME = "tokens"


class Tokens:
    """Looks at the special tokens of every policy that is trained or generates on a dataset."""

    def check(self, site: Site) -> Iterable[Finding]:
        """Report special tokens that are missing, out of range or the same."""
        if not datasets(site):
            return
        for port, policy in policies(site):
            yield from _end(port, policy)
            yield from _range(port, policy)
            yield from _padding(port, policy)


def _end(port: str, policy: Input) -> Iterable[Finding]:
    eos = policy.facts.eos
    if eos:
        return
    if eos is None and not policy.verified:
        message = f"whether {policy.origin} has an end-of-sequence token is not known yet"
        yield Finding(NAME, Level.NOTE, Certainty.UNKNOWN, message, port=port)
        return
    yield Finding(
        NAME,
        Level.ERROR,
        certainty(policy),
        f"{policy.origin} has no end-of-sequence token, so what it generates never ends",
        port=port,
        fix="name `eos_token` in `tokenizer_config.json`, or `eos_token_id` in `generation_config.json`",
    )


def _range(port: str, policy: Input) -> Iterable[Finding]:
    facts = policy.facts
    sizes = [(facts.vocabulary, "tokenizer's tokens"), (facts.embeddings, "embeddings")]
    bound, what = min(((size, name) for size, name in sizes if size is not None), default=(None, ""))
    ids = [("end-of-sequence", id) for id in facts.eos or ()]
    ids += [
        (name, id)
        for name, id in (("beginning-of-sequence", facts.bos), ("padding", facts.pad))
        if id is not None
    ]
    for name, id in ids:
        if bound is not None and not 0 <= id < bound:
            yield Finding(
                NAME,
                Level.ERROR,
                certainty(policy),
                f"the {name} token {id} of {policy.origin} lies outside the {bound} {what}",
                port=port,
                fix="correct the id in `generation_config.json`, `config.json` or the tokenizer's files",
            )


def _padding(port: str, policy: Input) -> Iterable[Finding]:
    pad, origin = policy.facts.pad, policy.origin
    if pad is None and policy.verified:
        message = f"{origin} has no padding token; masks go by length, so none is needed"
        yield Finding(NAME, Level.NOTE, certainty(policy), message, port=port)
    elif pad is not None and pad in (policy.facts.eos or ()):
        message = (
            f"the padding token of {origin} is an end-of-sequence token; "
            "masks go by length, so ends of turns are learned all the same"
        )
        yield Finding(NAME, Level.NOTE, certainty(policy), message, port=port)
    elif pad is not None and pad == policy.facts.unk:
        yield Finding(
            NAME,
            Level.WARNING,
            certainty(policy),
            f"the padding token of {origin} is its unknown token; what masks by id would hide unknown tokens",
            port=port,
            fix="give the tokenizer a padding token of its own",
        )
