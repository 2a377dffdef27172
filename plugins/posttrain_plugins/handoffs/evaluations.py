"""Evaluations: of rows that nobody trained on, with answers, about the models that are judged and promoted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from posttrain.artifacts.kinds import Kind
from posttrain.contracts.rule import Rule, Site
from posttrain.contracts.stage import Finding, Input, Level
from posttrain_plugins.data.rows import asked_prompts, trained_prompts
from posttrain_plugins.handoffs.lineage import (
    datasets,
    models,
    named,
    same,
    short,
    trained_on,
    trains,
)

TEXT = "text"
_EXAMPLES = 3


class _Overlap(Rule):
    """Compares prompts of rows that are evaluated on with those of rows that are trained on."""

    def overlaps(
        self, port: str, data: Input, source: Input, nodes: Sequence[str], level: Level | None = None
    ) -> Iterable[Finding]:
        """Report what two datasets have in common, or that it cannot be told."""
        where = f"the training data of {', '.join(nodes)} ({source.origin})"
        if data.origin == source.origin:
            yield self.finding(f"the evaluation data is {where}", data, source, port=port, level=level)
            return
        if data.prompts is None or source.prompts is None:
            yield self.unknown(f"whether prompts of {data.origin} occur in {where} is not known yet", port)
            return
        if (data.facts.format == TEXT) != (source.facts.format == TEXT):
            message = (
                f"whether prompts of {data.origin} occur in {where} cannot be told: `text` has no prompts"
            )
            yield self.unknown(message, port)
            return
        asked = asked_prompts(data.prompts)
        common = sorted(asked & trained_prompts(source.prompts))
        if common:
            message = (
                f"{len(common)} of {len(asked)} evaluation prompts also occur in {where}, with the hashes "
                f"{', '.join(common[:_EXAMPLES])}"
            )
            yield self.finding(message, data, source, port=port, level=level)


class Leakage(_Overlap):
    """Prompts of an evaluation occur in what an evaluated policy, or one that it comes from, was trained on.

    The score is then partly memory. Compared are whole prompts, of every dataset that any training stage before the
    evaluation reads; a few words that differ hide a leak from this rule, and `posttrain data contamination` compares
    by runs of words.
    """

    code = "H070"
    title = "evaluation rows occur in training data"
    level = Level.ERROR
    fix = (
        "evaluate on rows that were split off before training, with `split_by: prompt`, or remove these from the "
        "training data"
    )

    def check(self, site: Site) -> Iterable[Finding]:
        """Judge nodes that take models and data that they do not train on, and give a report."""
        if trains(site) or not models(site) or not _reports(site):
            return
        for port, data in datasets(site):
            for source, nodes in _training_data(site):
                yield from self.overlaps(port, data, source, nodes)


class HeldOutLeakage(_Overlap):
    """Prompts of the set that a trainer evaluates on while it trains occur in what it trains on.

    The held-out loss falls with the training loss, and early stopping and the choice of the best checkpoint are
    guided by rows that are known by heart. What an earlier stage was trained on is only noted: pairs are often made
    of the prompts of the demonstrations.
    """

    code = "H071"
    title = "held-out rows occur in training data"
    level = Level.WARNING
    fix = "split the held-out rows off before training, with `split_by: prompt`"

    def check(self, site: Site) -> Iterable[Finding]:
        """Judge the datasets that a trainer takes and does not train on."""
        if not trains(site) and not trained_on(site):
            return
        learned = trained_on(site)
        for port, data in datasets(site):
            for source, nodes in _training_data(site) if (port, data) not in learned else ():
                level = None if site.node in nodes else Level.NOTE
                yield from self.overlaps(port, data, source, nodes, level)


class ReportUnanswered(Rule):
    """A report that is used to judge rests on answers that are all empty or cut off.

    Such a score says that generation failed, not how good the model is: a missing template, a stop token that is not
    known, a limit of tokens that is too small. A score of exactly 0 is a broken run.
    """

    code = "H072"
    title = "a score that rests on no answers"
    level = Level.ERROR
    fix = "raise `max_new_tokens`; look at the model's template and its end-of-sequence tokens"

    def check(self, site: Site) -> Iterable[Finding]:
        """Judge the candidate of a report; of other models, and where answers are not checked, it is a warning."""
        judged = {each.artifact.digest for each in _judged(site) if each.artifact is not None}
        strict = getattr(site.config, "check_answers", True)
        for port, report in _reports_at(site):
            for model, share in (report.facts.unanswered or {}).items():
                if share >= 1.0 and model in judged and strict:
                    message = f"every answer of {short(model)} in {report.origin} is empty or was cut off"
                    yield self.finding(message, report, port=port)


class ReportExtreme(Rule):
    """The model that is judged has a score of exactly 0 or exactly 1.

    Few real models have either. More often the reference column is empty, the answers are compared with themselves,
    or the format of answers and references differs in a character.
    """

    code = "H073"
    title = "a score of exactly 0 or 1"
    level = Level.WARNING
    fix = "look at some items of the report before you believe it"

    def check(self, site: Site) -> Iterable[Finding]:
        """Look at the figures of the judged models that are shares."""
        if not getattr(site.config, "check_answers", True):
            return
        for port, report in _reports_at(site):
            for name, value in (report.facts.figures or {}).items():
                about = [each for each in _judged(site) if _figure_of(name, each, report)]
                if value in (0.0, 1.0) and name.startswith("exact_match") and about:
                    message = f"{report.origin} says that {name} is exactly {value:g}"
                    yield self.finding(message, report, port=port)


class JudgedOther(Rule):
    """A model is judged or promoted on a report that is not about it.

    The report or verdict of one model is connected with another: the base is promoted with the grade of the tuned
    model, or a gate judges a candidate that nobody evaluated.
    """

    code = "H074"
    title = "judged is not what was evaluated"
    level = Level.ERROR
    fix = "connect the report of the model that is judged, or add the model to the evaluation"

    def check(self, site: Site) -> Iterable[Finding]:
        """Follow a report to the models that it is about, by origin; digests are compared by the stages themselves."""
        for port, report in _reports_at(site):
            maker = site.upstream.get(report.origin)
            covered = [] if maker is None else _covered(maker)
            for model in models(site) if covered else ():
                own = model[1]
                if own.origin not in {each.origin for each in covered} and not any(
                    same(own, each) for each in covered
                ):
                    about = ", ".join(dict.fromkeys(each.origin for each in covered))
                    message = f"{report.origin} is about {about}, not about {own.origin}"
                    yield self.finding(message, Input(own.origin, own.kind, own.facts), port=port)


class SameCompared(Rule):
    """Two inputs that are compared are one and the same artifact.

    A candidate that is its own baseline never differs; the seeds of a matrix that give the same model have a seed
    that nothing uses.
    """

    code = "H075"
    title = "a model is compared with itself"
    level = Level.WARNING
    fix = "connect the model that is meant as the other side of the comparison"

    def check(self, site: Site) -> Iterable[Finding]:
        """Compare all policies of a node that does not train, by origin and by digest."""
        if trains(site):
            return
        found = models(site)
        for index, (port, one) in enumerate(found):
            for _, other in found[:index]:
                if one.origin == other.origin:
                    yield self.finding(f"{one.origin} is compared with itself", one, other, port=port)
                elif same(one, other):
                    message = f"{one.origin} and {other.origin} are one and the same model, {named(one)}"
                    yield self.finding(message, one, other, port=port)


class ReportsOfDifferentData(Rule):
    """Reports that are compared were made on different data.

    The difference between two scores is then one of the rows as much as of the models.
    """

    code = "H076"
    title = "reports on different data are compared"
    level = Level.ERROR
    fix = "evaluate both models on the same rows, best in one stage"

    def check(self, site: Site) -> Iterable[Finding]:
        """Compare the datasets of all evaluation reports that reach a node."""
        found = [(port, report) for port, report in _reports_at(site) if report.facts.data is not None]
        for (_, first), (port, second) in pairwise(found):
            if first.facts.data != second.facts.data:
                message = (
                    f"{first.origin} was measured on {short(first.facts.data)}, {second.origin} on "
                    f"{short(second.facts.data)}"
                )
                yield self.finding(message, first, second, port=port)


def _reports(site: Site) -> bool:
    return any(Kind.REPORT in port.kinds for port in site.stage.outputs(site.config))


def _training_data(site: Site) -> list[tuple[Input, list[str]]]:
    """Return each dataset that the node and its ancestors train on, with the nodes that do, by origin."""
    found: dict[str, tuple[Input, list[str]]] = {}
    for ancestor in (site, *site.ancestors()):
        for _, data in trained_on(ancestor):
            found.setdefault(data.origin, (data, []))[1].append(ancestor.node)
    return list(found.values())


def _reports_at(site: Site) -> Iterator[tuple[str, Input]]:
    for port, given in site.inputs.items():
        yield from ((port, each) for each in given if each.kind is Kind.REPORT)


def _judged(site: Site) -> list[Input]:
    """Return the policies that a node decides about: its candidates, or all it has where none is called so."""
    return list(site.inputs.get("candidate") or site.inputs.get("model") or ())


def _covered(maker: Site) -> list[Input]:
    """Return the models that a report is about: of a verdict its candidates, of an evaluation all of them."""
    return list(maker.inputs.get("candidate") or [each for _, each in models(maker)])


def _figure_of(name: str, model: Input, report: Input) -> bool:
    """Whether a figure is about a model: `exact_match[3f2c9a1b]`, or without digits of a single one."""
    digest = model.artifact.digest if model.artifact is not None else None
    inside = name.partition("[")[2].rstrip("]")
    return digest is not None and (
        digest.startswith(inside) if inside else report.facts.subjects == (digest,)
    )
