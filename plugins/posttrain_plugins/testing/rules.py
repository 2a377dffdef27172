"""The conformance suite of hand-off rules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.artifacts.kinds import FACTS_OF
from posttrain.contracts.registration import Group
from posttrain.contracts.rule import CODE, Rule, Site
from posttrain.contracts.stage import Certainty, Finding, Input, Level
from posttrain.registry.catalogue import Catalogue
from posttrain.registry.components import ConfigProblems, validate_config
from posttrain.registry.discovery import discover
from posttrain.registry.validation import faults
from posttrain_plugins.testing.suites import Check, Nonconformance, place_of, suite

__tracebackhide__ = True


@dataclass(frozen=True)
class RuleSubject:
    """A rule under test.

    Args:
        label: What people call it.
        rule: The class.
        silent: Sites at which it has to find nothing.
        fires: Sites at which it has to find something.
    """

    label: str
    rule: type[Rule]
    silent: Sequence[Site] = ()
    fires: Sequence[Site] = ()

    def findings(self, site: Site) -> list[Finding]:
        """Ask it about a site."""
        return list(self.rule().check(site))

    def refuse(self, message: str) -> Nonconformance:
        """Return the error that says what is wrong with the rule, and where it is written."""
        return Nonconformance(f"{self.label} ({place_of(self.rule)}): {message}")


def contract(subject: RuleSubject) -> None:
    """It has a code, a title, a level, a fix and a docstring that `posttrain explain` can print."""
    wrong = list(faults(Group.RULE, subject.rule))
    if wrong:
        raise subject.refuse("; ".join(wrong))
    if not re.fullmatch(CODE, subject.rule.code):
        raise subject.refuse(f"the code {subject.rule.code!r} is not letters and a number")


def unknown_facts(subject: RuleSubject) -> None:
    """Of what is not known it says nothing that refuses a run, at any registered stage."""
    for site in _unknown(discover()):
        for finding in subject.findings(site):
            if finding.level is Level.ERROR and finding.certainty is not Certainty.UNKNOWN:
                raise subject.refuse(
                    f"it reports an error at {site.uses}, whose inputs have no known facts: {finding.message}"
                )


def _unknown(catalogue: Catalogue) -> Iterable[Site]:
    """Yield every stage that needs no options, with inputs of which nothing is known, of each kind it takes."""
    for name in catalogue.stages():
        stage = catalogue.stage(name)
        try:
            config = validate_config(stage.config, {}, catalogue)
        except ConfigProblems:
            continue
        for ports in ([port for port in stage.inputs if not port.optional], stage.inputs):
            for place in range(max((len(port.kinds) for port in ports), default=1)):
                kinds = {port.name: sorted(port.kinds)[place % len(port.kinds)] for port in ports}
                inputs = {
                    port: [Input(f"some.{port}", kind, FACTS_OF[kind]())] for port, kind in kinds.items()
                }
                yield Site(name, name, stage, config, inputs, {})


def silent(subject: RuleSubject) -> None:
    """It is silent at sites that its author calls sound."""
    for site in subject.silent:
        found = subject.findings(site)
        if found:
            raise subject.refuse(f"it reports something at the sound site {site.node!r}: {found[0].message}")


def fires(subject: RuleSubject) -> None:
    """It fires at sites that its author calls faulty, with its code, a message and a fix."""
    for site in subject.fires:
        found = subject.findings(site)
        if not found:
            raise subject.refuse(f"it reports nothing at the faulty site {site.node!r}")
        for finding in found:
            if finding.code != subject.rule.code or not finding.message.strip() or not finding.fix:
                raise subject.refuse(f"a finding needs the rule's code, a message and a fix: {finding}")


CHECKS: Mapping[str, Check[RuleSubject]] = {
    "contract": Check(contract),
    "unknown_facts": Check(unknown_facts),
    "silent": Check(silent, lambda subject: bool(subject.silent)),
    "fires": Check(fires, lambda subject: bool(subject.fires)),
}
"""What must hold of every rule."""


def rule_conformance(
    rule: str | type[Rule],
    *,
    silent: Sequence[Site] = (),
    fires: Sequence[Site] = (),
    except_: Mapping[str, str] | None = None,
    files: Sequence[str | Path] = (),
) -> type:
    """Return the conformance suite of a hand-off rule as a class of tests.

    Args:
        rule: The name it is registered by, or the class, which need not be registered.
        silent: Sites at which it has to find nothing.
        fires: Sites at which it has to find something.
        except_: Checks that it is known not to pass, each with the reason. One that passes all the same fails.
        files: Local plugin files in which the name may be.

    Raises:
        SpecError: `except_` names no check, or gives no reason.
    """

    def subject() -> RuleSubject:
        found: Any = rule
        if isinstance(rule, str):
            found = discover([Path(file) for file in files]).load(Group.RULE, rule)
        return RuleSubject(rule if isinstance(rule, str) else rule.__name__, found, silent, fires)

    return suite(CHECKS, subject, except_)
