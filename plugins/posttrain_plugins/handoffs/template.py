"""Chat templates must be there when conversations are, and agree between policies that are used together."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

from posttrain.contracts.rule import Site
from posttrain.contracts.stage import Certainty, Finding, Input, Level
from posttrain.contracts.trainer import Trainer
from posttrain_plugins.handoffs.lineage import certainty, datasets, policies

NAME = "template"
CONVERSATIONS = {"messages": True, "text": False}
"""Formats whose rows are always, or never, conversations; those of the others may be either."""


class Template:
    """Looks for missing templates and for templates that render the probe conversations differently."""

    def check(self, site: Site) -> Iterable[Finding]:
        """Report what would make the policies read conversations wrongly or differently."""
        found = policies(site)
        for port, policy in found:
            for _, data in datasets(site):
                yield from _missing(port, policy, data)
        if datasets(site):
            for (_, first), (port, second) in combinations(found, 2):
                yield from _differing(site, port, first, second)


def _missing(port: str, policy: Input, data: Input) -> Iterable[Finding]:
    has, needed = policy.facts.has_template, _conversational(data)
    if has or needed is False:
        return
    if has is False and needed:
        yield Finding(
            NAME,
            Level.ERROR,
            certainty(policy, data),
            f"{data.origin} holds conversations, but {policy.origin} has no chat template",
            port=port,
            fix="give the model a template where it is made or loaded, such as `template: chatml`",
        )
    elif not (has is None and needed is None):
        message = f"whether {policy.origin} has a chat template for {data.origin} is not known yet"
        if has is False:
            message = (
                f"{policy.origin} has no chat template; whether {data.origin} needs one is not known yet"
            )
        yield Finding(NAME, Level.NOTE, Certainty.UNKNOWN, message, port=port)


def _conversational(data: Input) -> bool | None:
    known: bool | None = data.facts.conversational
    return known if known is not None else CONVERSATIONS.get(data.facts.format or "")


def _differing(site: Site, port: str, first: Input, second: Input) -> Iterable[Finding]:
    one, other = first.facts.template, second.facts.template
    if one is None or other is None or one.text == other.text:
        return
    training = isinstance(site.stage, Trainer)
    yield Finding(
        NAME,
        Level.ERROR if training else Level.WARNING,
        certainty(first, second),
        f"the chat templates of {first.origin} and {second.origin} render the same conversation differently",
        port=port,
        fix="use models that come from one base, unless the difference is what you compare",
    )
