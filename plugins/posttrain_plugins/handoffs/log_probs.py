"""Log-probs of a reference belong to one policy, one dataset and the options that they were scored with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from posttrain.artifacts.kinds import LogProbFacts
from posttrain.contracts.loss import REFERENCES, Need
from posttrain.contracts.rule import Rule, Site
from posttrain.contracts.stage import Finding, Input, Level
from posttrain.contracts.trainer import Trainer
from posttrain_plugins.data.log_probs import conditions
from posttrain_plugins.handoffs.lineage import named, same, short
from posttrain_plugins.preparation.mismatched import MISMATCHED
from posttrain_plugins.training.objective import known_needs
from posttrain_plugins.training.options import LOG_PROBS


class LogProbsOther(Rule):
    """Log-probs of a reference come from another policy or dataset than the training's, or from other options.

    They would be taken for what the starting policy says: the pull towards the reference then goes somewhere else,
    and a row is compared with what was said of another one. Nothing would fail; a cache that is looked up by the
    dataset's name alone does this.
    """

    code = "H044"
    title = "log-probs of another policy, dataset or options"
    level = Level.ERROR
    fix = "give `data.log_probs` the same model, data and options as this training, or leave `log_probs` out"

    def check(self, site: Site) -> Iterable[Finding]:
        """Compare what the log-probs were made of with what the training takes."""
        if not isinstance(site.stage, Trainer):
            return
        for given in site.inputs.get(LOG_PROBS, ()):
            facts = given.facts.log_probs
            if facts is None:
                yield self.unknown(f"what {given.origin} was made of is not known", LOG_PROBS)
                continue
            yield from self._sources(site, given, facts)
            for problem in (*_options(site, facts), *_needs(site, facts)):
                yield self.finding(f"{named(given)} {problem}", given, port=LOG_PROBS)

    def _sources(self, site: Site, given: Input, facts: LogProbFacts) -> Iterator[Finding]:
        """Compare digests where both are known, else where policy and dataset come from."""
        for port, digest in (("model", facts.policy), ("data", facts.data)):
            for source in site.inputs.get(port, ()):
                other, known = _other(site, given, port, digest, source), (given, source)
                if other is not None:
                    message = f"{named(given)} was made with {other} at `{port}`, and the training with {named(source)}"
                    yield self.finding(message, *known, port=LOG_PROBS)


def _other(site: Site, given: Input, port: str, digest: str | None, source: Input) -> str | None:
    """Return what was scored, where it is something else."""
    if digest is not None and source.artifact is not None:
        return None if digest == source.artifact.digest else short(digest)
    maker = site.upstream.get(given.origin)
    taken = [] if maker is None else list(maker.inputs.get(port, ()))
    if not taken or any(each.origin == source.origin or same(each, source) for each in taken):
        return None
    return named(taken[0])


def _options(site: Site, facts: LogProbFacts) -> Iterator[str]:
    """Say which options differ; what is not known does not."""
    made = facts.options or {}
    context = next((model.facts.context for model in site.inputs.get("model", ())), None)
    for name, wanted in conditions(site.config, context).items():
        found = made.get(name, wanted)
        unknown = name == "max_length" and None in (found, wanted)
        if found != wanted and not unknown:
            yield f"was made with {name} {found}, and the training has {wanted}"
    if facts.seed is not None and facts.seed != site.config.seed:
        yield f"has answers of other rows by seed {facts.seed}, and the training has {site.config.seed}"


def _needs(site: Site, facts: LogProbFacts) -> Iterator[str]:
    """Say what the losses need and the log-probs lack."""
    assert isinstance(site.stage, Trainer), "only trainers have losses"
    needs = known_needs(site.stage, site.config)
    if needs is None:
        return
    if not needs & REFERENCES:
        yield "would be ignored: no loss compares with a reference"
    if Need.REFERENCE_TOKENS in needs and facts.tokens is False:
        yield "holds sums, and the loss needs the log-prob of each token (`tokens: true`)"
    if facts.roles is not None and (Need.MISMATCHED in needs) != (MISMATCHED in facts.roles):
        needed = Need.MISMATCHED in needs
        yield (
            "lacks the answers of other rows, which the loss needs (`mismatched: true`)"
            if needed
            else "has the answers of other rows, which the loss does not need (leave `mismatched` out)"
        )
