"""Chat templates: there where conversations are, the same for all who read them, and what other tools will take."""

from __future__ import annotations

from collections.abc import Iterable

from posttrain.contracts.rule import Rule, Site
from posttrain.contracts.stage import Finding, Input, Level
from posttrain_plugins.handoffs.lineage import (
    datasets,
    generator_of,
    kin,
    models,
    named,
    policies,
    prefers,
    together,
    trained_on,
    trains,
)
from posttrain_plugins.templates.calling import WITH_CALLS

CONVERSATIONS = {"messages": True, "text": False}
"""Formats whose rows are always, or never, conversations; those of the others may be either."""


class TemplateMissing(Rule):
    """Rows are conversations and the policy has no chat template.

    A tool that renders them anyway makes a template up, another one than the next tool. Here such rows are refused.
    It shows when a base model without a template is put where an instruct model was.
    """

    code = "H001"
    title = "conversations without a chat template"
    level = Level.ERROR
    fix = "give the model a template where it is made or loaded, such as `template: chatml`"

    def check(self, site: Site) -> Iterable[Finding]:
        """Compare each policy, and each model that gives numbers, with each dataset."""
        for port, policy in models(site):
            for _, data in datasets(site):
                yield from self._judge(port, policy, data)

    def _judge(self, port: str, policy: Input, data: Input) -> Iterable[Finding]:
        has, needed = policy.facts.has_template, _conversational(data)
        if has or needed is False:
            return
        if has is False and needed:
            message = f"{data.origin} holds conversations, but {policy.origin} has no chat template"
            yield self.finding(message, policy, data, port=port)
        elif has is False:
            message = (
                f"{policy.origin} has no chat template; whether {data.origin} needs one is not known yet"
            )
            yield self.unknown(message, port)
        elif needed is not None:
            yield self.unknown(
                f"whether {policy.origin} has a chat template for {data.origin} is not known yet", port
            )


class TemplatesDiffer(Rule):
    """Two policies that are used together render the same conversation differently.

    Their answers are then compared on different questions, or one is trained towards what the other says to something
    else. OLMo 3 7B was released with another template than its evaluations had used; scores of 26 and 57 have been
    reported for one model under two templates.
    """

    code = "H002"
    title = "policies that are used together have different chat templates"
    level = Level.WARNING
    fix = "use models that come from one base, unless the difference is what you compare"

    def check(self, site: Site) -> Iterable[Finding]:
        """Compare every two policies of a node that has a dataset; for a trainer a difference is an error."""
        if not datasets(site):
            return
        for port, first, second in together(site):
            if differ(first, second):
                message = (
                    f"the chat templates of {first.origin} and {second.origin} render the same conversation "
                    "differently"
                )
                level = Level.ERROR if trains(site) else None
                yield self.finding(message, first, second, port=port, level=level)


class TemplateChanged(Rule):
    """A policy has another chat template than the policy it was made from, or than the one that made its data.

    A stage in between replaced or lost the template. What was learned under the old one answers worse under the new
    one, by a little or by half, and nothing fails: the most frequent complaint about chains of training tools.
    Demonstrations of a teacher with a template of its own are only noted.
    """

    code = "H003"
    title = "the chat template changed on the way"
    level = Level.WARNING
    fix = "let the stage in between hand the template on, or set the new one before the first training"

    def check(self, site: Site) -> Iterable[Finding]:
        """Compare each policy with its parent, and with the policy that generated each dataset."""
        for port, policy, source in kin(site):
            yield from self._lost(port, policy, source)
            if differ(policy, source):
                message = f"the chat template of {named(policy)} is not that of {named(source)}, which it comes from"
                yield self.finding(message, policy, source, port=port)
        level = None if prefers(site) else Level.NOTE
        for port, data in datasets(site):
            made = generator_of(site, data)
            for _, policy in policies(site):
                if made is not None and differ(made.policy, policy):
                    message = (
                        f"{data.origin} was generated by {named(made.policy)}, whose chat template is not that "
                        f"of {named(policy)}"
                    )
                    yield self.finding(message, made.policy, policy, port=port, level=level)

    def _lost(self, port: str, policy: Input, source: Input) -> Iterable[Finding]:
        if source.facts.has_template and policy.facts.has_template is False:
            message = f"{named(policy)} has lost the chat template of {named(source)}, which it comes from"
            yield self.finding(message, policy, source, port=port)


class TemplateOverruled(Rule):
    """A model directory holds several chat templates that differ.

    `chat_template.jinja` beats `chat_template.json`, which beats the one in `tokenizer_config.json`; but not every
    tool, nor every version of one, looks into all of them. Training then renders with one and serving with another.
    """

    code = "H004"
    title = "the file `chat_template.jinja` and the tokenizer's config disagree"
    level = Level.WARNING
    fix = "remove the template that is not meant from the model's directory, or set one with `template` of `model.load`"

    def check(self, site: Site) -> Iterable[Finding]:
        """Report policies whose own files disagree."""
        for port, policy in policies(site):
            if policy.facts.overruled:
                files = " and ".join(policy.facts.overruled)
                message = f"{policy.origin} has another chat template in {files} than the one that is used"
                yield self.finding(message, policy, port=port)


class TemplateUnopened(Rule):
    """The template ignores `add_generation_prompt`, though its answers begin with a header.

    A prompt then ends with the user's turn, and the policy has to write the assistant's header itself: it was never
    trained to, often answers as the user, and the header ends up in the answer.
    """

    code = "H005"
    title = "the generation prompt does not open an answer"
    level = Level.WARNING
    fix = "add `{% if add_generation_prompt %}…{% endif %}` with the assistant's header to the template"

    def check(self, site: Site) -> Iterable[Finding]:
        """Report policies that are trained or asked with such a template."""
        if not datasets(site):
            return
        for port, policy in policies(site):
            if policy.facts.opens is False:
                message = (
                    f"the chat template of {policy.origin} has no generation prompt, but puts a header before "
                    "every answer"
                )
                yield self.finding(message, policy, port=port)


class TemplateDated(Rule):
    """The template prints today's date.

    Here it is always told the same date, so that a run gives the same tokens on any day. Other tools tell it the real
    one, so what the model sees in use is not quite what it was trained on.
    """

    code = "H006"
    title = "the chat template prints the date"
    level = Level.NOTE
    fix = "nothing, if the model is meant to know the date"

    def check(self, site: Site) -> Iterable[Finding]:
        """Note it where a policy is trained."""
        if not trains(site):
            return
        for port, policy in policies(site):
            if policy.facts.template is not None and policy.facts.template.dated:
                message = (
                    f"the chat template of {policy.origin} prints the date; it is told the same one every day"
                )
                yield self.finding(message, policy, port=port)


class CallsUnshown(Rule):
    """Rows call tools, and the template does not show calls.

    The answers are then learned without the calls that they consist of, or rows whose answer is a call alone are
    refused. What the model is to call, and when, is not learned at all.
    """

    code = "H007"
    title = "tool calls that the chat template does not show"
    level = Level.WARNING
    fix = (
        f"give the model a template that shows them with `template` of `model.load`: {', '.join(WITH_CALLS)}"
    )

    def check(self, site: Site) -> Iterable[Finding]:
        """Compare each policy that is trained with the datasets it is trained on."""
        if not trains(site):
            return
        for port, policy in policies(site):
            for _, data in trained_on(site):
                if data.facts.calls and policy.facts.calls is False:
                    message = f"rows of {data.origin} call tools, which the chat template of {policy.origin} leaves out"
                    yield self.finding(message, policy, data, port=port)


def differ(first: Input, second: Input) -> bool:
    """Whether two policies are known to render the probe conversations differently; templates of two names do."""
    one, other = first.facts.template, second.facts.template
    if one is not None and other is not None:
        return bool(one.text != other.text)
    names = {first.facts.template_name, second.facts.template_name}
    return None not in names and len(names) == 2


def _conversational(data: Input) -> bool | None:
    known: bool | None = data.facts.conversational
    return known if known is not None else CONVERSATIONS.get(data.facts.format or "")
