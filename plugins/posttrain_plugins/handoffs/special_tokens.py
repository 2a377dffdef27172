"""Special tokens: what begins, ends and pads a sequence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from posttrain.contracts.rule import Rule, Site
from posttrain.contracts.stage import Finding, Input, Level
from posttrain_plugins.handoffs.lineage import datasets, kin, named, policies

_CORRECT = "correct the id in `generation_config.json`, `config.json` or the tokenizer's files"


def used(site: Site) -> Iterator[tuple[str, Input]]:
    """Yield the policies that are trained or asked on a dataset, with their ports."""
    if datasets(site):
        yield from policies(site)


class EndMissing(Rule):
    """A policy has no end-of-sequence token at all.

    Nothing it generates ends before the length limit, and what is trained has no end to learn.
    """

    code = "H010"
    title = "no end-of-sequence token"
    level = Level.ERROR
    fix = "name `eos_token` in `tokenizer_config.json`, or `eos_token_id` in `generation_config.json`"

    def check(self, site: Site) -> Iterable[Finding]:
        """Look at every policy that is trained or asked."""
        for port, policy in used(site):
            eos = policy.facts.eos
            if eos:
                continue
            if eos is None and not policy.verified:
                yield self.unknown(
                    f"whether {policy.origin} has an end-of-sequence token is not known yet", port
                )
                continue
            message = f"{policy.origin} has no end-of-sequence token, so what it generates never ends"
            yield self.finding(message, policy, port=port)


class TokenOutOfRange(Rule):
    """A special token's id is beyond the tokenizer or beyond the embeddings.

    On a GPU that is an error without a message in the middle of a kernel; elsewhere, whatever lies in that memory.
    It shows after vocabularies were resized and a config was copied from before.
    """

    code = "H011"
    title = "a special token out of range"
    level = Level.ERROR
    fix = _CORRECT

    def check(self, site: Site) -> Iterable[Finding]:
        """Compare each special token with the smaller of the two sizes."""
        for port, policy in used(site):
            facts = policy.facts
            sizes = [(facts.vocabulary, "tokenizer's tokens"), (facts.embeddings, "embeddings")]
            bound, what = min(((size, name) for size, name in sizes if size is not None), default=(None, ""))
            for name, id in _ids(policy):
                if bound is not None and not 0 <= id < bound:
                    message = f"the {name} token {id} of {policy.origin} lies outside the {bound} {what}"
                    yield self.finding(message, policy, port=port)


class EndOfTurnUndeclared(Rule):
    """The token that closes an answer in the chat template is none that the generation config stops at.

    Training teaches the end of turn, and whoever serves the model waits for another token: it talks on, as the user
    and itself in turns. A base model with `<|endoftext|>` that is tuned with ChatML has exactly this. Rollouts and
    evaluations here stop at both.
    """

    code = "H012"
    title = "the template's end of turn is not a stop token"
    level = Level.WARNING
    fix = "add the id to `eos_token_id` of `generation_config.json`"

    def check(self, site: Site) -> Iterable[Finding]:
        """Compare the template's end of turn with what other tools stop at."""
        for port, policy in used(site):
            end, declared = policy.facts.end_of_turn, policy.facts.declared_eos
            if end is not None and declared is not None and end not in declared:
                stops = ", ".join(map(str, declared)) or "nothing"
                message = (
                    f"the chat template of {policy.origin} closes an answer with token {end}, but the model's "
                    f"configs stop at {stops}"
                )
                yield self.finding(message, policy, port=port)


class PadMissing(Rule):
    """A policy names no padding token.

    Harmless here: masks go by length, and any token fills a batch. Tools that mask by id choose one themselves, often
    the end of sequence, and then hide the ends of answers from the loss.
    """

    code = "H013"
    title = "no padding token"
    level = Level.NOTE
    fix = "nothing here; for other tools, give the tokenizer a padding token of its own"

    def check(self, site: Site) -> Iterable[Finding]:
        """Note policies without one."""
        for port, policy in used(site):
            if policy.facts.pad is None and policy.verified:
                message = f"{policy.origin} has no padding token; masks go by length, so none is needed"
                yield self.finding(message, policy, port=port)


class PadIsEnd(Rule):
    """The padding token is an end-of-sequence token.

    Where a collator masks every padding id, the end of an answer is masked with it, and the model never learns to
    stop: reported for TRL, the alignment handbook and Unsloth. Harmless here, since masks go by length; that some end
    is learned is checked on the first step all the same.
    """

    code = "H014"
    title = "padding and end of sequence are one token"
    level = Level.NOTE
    fix = "nothing here; for tools that mask by id, give the tokenizer a padding token of its own"

    def check(self, site: Site) -> Iterable[Finding]:
        """Note policies where they are the same."""
        for port, policy in used(site):
            pad = policy.facts.pad
            if pad is not None and pad in (policy.facts.eos or ()):
                message = (
                    f"the padding token of {policy.origin} is an end-of-sequence token; masks go by length, so "
                    "ends of turns are learned all the same"
                )
                yield self.finding(message, policy, port=port)


class PadIsUnknown(Rule):
    """The padding token is the unknown token.

    What masks by id hides every character that the tokenizer does not know, in the middle of texts. Harmless here,
    since masks go by length.
    """

    code = "H015"
    title = "padding and unknown are one token"
    level = Level.NOTE
    fix = "nothing here; for tools that mask by id, give the tokenizer a padding token of its own"

    def check(self, site: Site) -> Iterable[Finding]:
        """Report policies where they are the same, and are no end of sequence."""
        for port, policy in used(site):
            pad = policy.facts.pad
            if pad is not None and pad == policy.facts.unk and pad not in (policy.facts.eos or ()):
                message = (
                    f"the padding token of {policy.origin} is its unknown token; masks go by length, so unknown "
                    "characters are learned all the same"
                )
                yield self.finding(message, policy, port=port)


class BosTwice(Rule):
    """The chat template prints BOS and the tokenizer adds another one to what it is given.

    A tool that tokenizes rendered text with special tokens starts every sequence with BOS BOS, a start that the model
    has not seen. Common among Llama, Mistral and Gemma models. Rendered text is tokenized without special tokens
    here, and a doubled BOS in the first step's tokens is an error.
    """

    code = "H016"
    title = "BOS in the template and from the tokenizer"
    level = Level.NOTE
    fix = "nothing here; elsewhere, tokenize rendered conversations with `add_special_tokens=False`"

    def check(self, site: Site) -> Iterable[Finding]:
        """Note policies with both."""
        for port, policy in used(site):
            if policy.facts.bos_twice:
                message = (
                    f"the chat template of {policy.origin} prints BOS, and its tokenizer would add another"
                )
                yield self.finding(message, policy, port=port)


class EndsChanged(Rule):
    """A policy lacks an end token that the policy it was made from stops at.

    It was trained or is compared with one stop set and goes on with a smaller one: answers run on behind their end.
    """

    code = "H017"
    title = "a stop token was lost on the way"
    level = Level.WARNING
    fix = "let the stage in between hand on `generation_config.json` and the tokenizer's files"

    def check(self, site: Site) -> Iterable[Finding]:
        """Compare each policy's stop set with its parent's."""
        for port, policy, source in kin(site):
            own, before = policy.facts.eos, source.facts.eos
            if own is None or before is None or set(before) <= set(own):
                continue
            lost = ", ".join(str(id) for id in sorted(set(before) - set(own)))
            message = f"{named(policy)} does not stop at {lost}, as {named(source)} does, which it comes from"
            yield self.finding(message, policy, source, port=port)


class GenerationLost(Rule):
    """A policy lacks generation settings of the policy it was made from.

    `generation_config.json` holds stop tokens and sampling defaults that a model was tuned for; a stage that writes
    weights and forgets it makes answers longer, or random, without any error.
    """

    code = "H018"
    title = "the generation config was lost or changed on the way"
    level = Level.WARNING
    fix = "let the stage in between copy `generation_config.json`"

    def check(self, site: Site) -> Iterable[Finding]:
        """Compare the generation config with the parent's; only artifacts tell that there is none."""
        for port, policy, source in kin(site):
            before, own = source.facts.generation, policy.facts.generation
            if not before or (own is None and not policy.verified):
                continue
            own = own or {}
            changed = [name for name, value in before.items() if own.get(name) != value]
            if changed:
                what = ", ".join(f"`{name}`" for name in sorted(changed)[:3])
                message = f"{named(policy)} has not the {what} of {named(source)}, which it comes from"
                yield self.finding(message, policy, source, port=port)


def _ids(policy: Input) -> Iterator[tuple[str, int]]:
    facts = policy.facts
    for id in facts.eos or ():
        yield "end-of-sequence", id
    for name, id in (("beginning-of-sequence", facts.bos), ("padding", facts.pad)):
        if id is not None:
            yield name, id
