"""Datasets: of a format that the port takes, enough, not twice, short enough, and tokenized for this very policy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from posttrain.contracts.rule import Rule, Site
from posttrain.contracts.stage import Finding, Input, Level
from posttrain.contracts.trainer import Trainer
from posttrain.errors import DataError
from posttrain.wording import either
from posttrain_plugins.handoffs.lineage import datasets, policies, short, trained_on, trainings
from posttrain_plugins.handoffs.preferences import flawed

_CHARACTERS = 8
"""No tokenizer of natural language puts more characters than this into a token over a whole row."""
_SINGLE = 600
"""A vocabulary of fewer tokens has one for a character or a byte."""


class DatasetFormat(Rule):
    """A dataset has another format than the port takes.

    Formats say what is learned from a row. Types that only say "a JSONL file" let demonstrations through where
    preferences are wanted.
    """

    code = "H060"
    title = "a dataset of another format"
    level = Level.ERROR
    fix = "set `format` or `columns` where the data is loaded, or use a stage for this format"

    def check(self, site: Site) -> Iterable[Finding]:
        """Compare each dataset's format with its port's formats."""
        ports = site.ports()
        for name, data in datasets(site):
            allowed = ports[name].formats if name in ports else frozenset()
            format = data.facts.format
            if not allowed or format in allowed:
                continue
            expected = either(f"`{each}`" for each in allowed)
            if format is None:
                yield self.unknown(f"whether {data.origin} has the format {expected} is not known yet", name)
                continue
            message = f"{data.origin} has the format `{format}`, but `{name}` of {site.uses} takes {expected}"
            yield self.finding(message, data, port=name, fix=_way(data, sorted(allowed)))


def _way(data: Input, allowed: Sequence[str]) -> str | None:
    """Return how rows come to have one of the formats: by their columns, or by a conversion; None for neither."""
    from posttrain_plugins.data.formats import CANONICAL, format_of
    from posttrain_plugins.data.formats.routes import route

    formats = {name: format_of(name) for name in CANONICAL}
    columns, found = set(data.facts.columns or ()), str(data.facts.format)
    for name in (each for each in allowed if each in formats):
        if set(formats[name].columns) <= columns:
            own = ", ".join(f"`{column}`" for column in formats[name].columns)
            value = "; each `label` must be true or false" if "label" in formats[name].columns else ""
            return f"read {own} with `format: {name}` where the data is loaded{value}"
    ways = []
    for name in (each for each in allowed if each in formats and found in formats):
        try:
            ways.append((len(route(formats, found, name).steps), name))
        except DataError:
            continue
    if not ways:
        return None
    name = min(ways)[1]
    return (
        f"turn the rows into `{name}` with the stage `data.convert` and `to: {name}`, or beforehand with "
        f"`posttrain data convert DATA --to {name} --output FILE`"
    )


class DatasetSmall(Rule):
    """Training data has fewer rows than one optimizer step takes.

    Every step sees every row, some of them several times. A filter that was too strict, a join that lost its rows or
    a limit from a smoke run left too little.
    """

    code = "H061"
    title = "fewer rows than a step"
    level = Level.WARNING
    fix = "look at where the rows were lost, or lower `batch_size`"

    def check(self, site: Site) -> Iterable[Finding]:
        """Compare the number of rows with the batch size."""
        batch = getattr(site.config, "batch_size", None)
        for port, data in trained_on(site):
            rows = data.facts.rows
            if rows is not None and batch is not None and rows < batch:
                message = f"{data.origin} has only {rows} rows, and a step takes {batch}"
                yield self.finding(message, data, port=port)


class TrainedTwice(Rule):
    """A policy is trained on a dataset that it has been trained on before, in the same way.

    Two stages with the same demonstrations are more epochs than the author of either had in mind; a copied stage
    whose input was not changed looks just like this.
    """

    code = "H062"
    title = "the same data is trained on twice"
    level = Level.WARNING
    fix = "connect the data that is meant for this stage, or train for more epochs in one stage"

    def check(self, site: Site) -> Iterable[Finding]:
        """Compare the datasets of a trainer with those of the trainers of its family that the policy went through."""
        if not isinstance(site.stage, Trainer):
            return
        for port, data in trained_on(site):
            for _, policy in policies(site):
                for earlier in trainings(site, policy):
                    if getattr(earlier.stage, "family", None) is not site.stage.family:
                        continue
                    if any(_same(data, each) for _, each in trained_on(earlier)):
                        message = f"{earlier.node} has trained {policy.origin} on {data.origin} already"
                        yield self.finding(message, data, port=port)


class RowsLong(Rule):
    """The longest row is surely longer than `max_length`.

    What is cut off is mostly the end of answers, and with it the end of turn. How many rows that are is known when
    they are tokenized, and then said; here the longest row's characters are compared, as far as that tells. Where the
    stage's options name a `truncation`, its author has decided, and nothing is said.
    """

    code = "H063"
    title = "rows longer than max_length"
    level = Level.WARNING
    fix = "raise `max_length`, or choose with `truncation` what becomes of long rows"

    def check(self, site: Site) -> Iterable[Finding]:
        """Compare characters with tokens; a tokenizer of single characters needs one for each."""
        if "truncation" in getattr(site.config, "model_fields_set", ()):
            return
        for port, data in trained_on(site):
            longest = data.facts.longest
            for _, policy in policies(site):
                limit = getattr(site.config, "max_length", None) or policy.facts.context
                vocabulary = policy.facts.vocabulary
                if longest is None or limit is None or vocabulary is None:
                    continue
                least = longest if vocabulary < _SINGLE else longest // _CHARACTERS
                if least > limit:
                    message = (
                        f"the longest row of {data.origin} has {longest} characters, at least {least} tokens; "
                        f"{site.node} takes {limit}"
                    )
                    yield self.finding(message, data, policy, port=port)


class TokensStale(Rule):
    """Tokenized rows were made with another tokenizer or template than this policy's.

    The ids mean other words, or the turns are marked in another way, and there is no text left to look at. A template
    that was changed after the data was tokenized is the usual case.
    """

    code = "H064"
    title = "tokenized data older than its tokenizer or template"
    level = Level.ERROR
    fix = "tokenize the rows again with this policy"

    def check(self, site: Site) -> Iterable[Finding]:
        """Compare what the rows were tokenized with, and the policies of the node."""
        for port, data in datasets(site):
            made = data.facts.tokens
            for _, policy in policies(site) if made is not None else ():
                template = policy.facts.template
                pairs = (
                    ("tokenizer", made.tokenizer, policy.facts.tokenizer),
                    ("chat template", made.template, None if template is None else template.tokens),
                )
                for what, then, now in pairs:
                    if then is not None and now is not None and then != now:
                        message = (
                            f"{data.origin} was tokenized with another {what} ({short(then)}) than that of "
                            f"{policy.origin} ({short(now)})"
                        )
                        yield self.finding(message, data, policy, port=port)
                        break


class TokensLong(Rule):
    """Tokenized rows may be longer than the policy's context or the stage's `max_length`.

    They were made for another model or another limit. A trainer cuts them, and what is cut is the end of answers.
    """

    code = "H065"
    title = "tokenized rows longer than the context"
    level = Level.WARNING
    fix = "tokenize the rows again with a smaller `max_length`"

    def check(self, site: Site) -> Iterable[Finding]:
        """Compare the lengths."""
        for port, data in datasets(site):
            longest = None if data.facts.tokens is None else data.facts.tokens.max_length
            for _, policy in policies(site):
                limit = getattr(site.config, "max_length", None) or policy.facts.context
                if longest is not None and limit is not None and longest > limit:
                    message = f"{data.origin} was tokenized for {longest} tokens a row, and {site.node} takes {limit}"
                    yield self.finding(message, data, policy, port=port)


class RowsRepeated(Rule):
    """Most rows of the training data are copies of others.

    A join on the wrong column repeats one row for all, an upload that was retried doubles them. The loss falls fast,
    and what was learned is a few rows by heart.
    """

    code = "H066"
    title = "most rows are copies"
    level = Level.WARNING
    fix = "look at how the rows were made; `drop_duplicates: true` of `data.load` keeps one of each"

    def check(self, site: Site) -> Iterable[Finding]:
        """Report datasets of which more than half of the rows equal an earlier one."""
        for port, data, share in _mostly(site, "repeated_rows"):
            yield self.finding(f"{share} rows of {data.origin} equal an earlier one", data, port=port)


class AnswersFirst(Rule):
    """In most conversations the assistant speaks first.

    Roles that were exchanged when another tool's `human` and `gpt` were renamed teach the model to be the user. A
    greeting before the first question looks the same, where it is in nearly every row.
    """

    code = "H067"
    title = "the assistant speaks first"
    level = Level.WARNING
    fix = "look at the roles of some rows; if the greeting is meant, there is nothing to do"

    def check(self, site: Site) -> Iterable[Finding]:
        """Report datasets in which more than half of the conversations begin so."""
        for port, data, share in _mostly(site, "answers_first"):
            message = f"{share} conversations of {data.origin} begin with the assistant"
            yield self.finding(message, data, port=port)


def _mostly(site: Site, flaw: str) -> Iterator[tuple[str, Input, str]]:
    """Yield the datasets of which more than half of the rows have a flaw, and how many of how many."""
    for port, data, count in flawed(site, flaw):
        rows = data.facts.rows
        if rows is not None and 2 * count > rows:
            yield port, data, f"{count} of {rows}"


def _same(one: Input, other: Input) -> bool:
    if one.artifact is not None and other.artifact is not None:
        return one.artifact.digest == other.artifact.digest
    return one.origin == other.origin
