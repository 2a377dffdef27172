"""What holds for every registered rule."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from helpers.sites import STAGES, adapter, data, policy, site

from posttrain.artifacts.kinds import FACTS_OF, Kind
from posttrain.contracts.registration import Registration
from posttrain.contracts.rule import Rule, Site
from posttrain.contracts.stage import Certainty, Finding, Input, Level
from posttrain_plugins.registration import posttrain_rules

ONE_ORIGIN = {"leakage", "held-out-leakage", "same-compared", "trained-twice"}
"""Rules that need no facts where one and the same output is connected twice."""
RULES = {registration.name: registration for registration in posttrain_rules()}
MAKERS = {Kind.DATASET: data, Kind.MODEL: policy, Kind.ADAPTER: adapter}


def blank(kind: Kind, origin: str) -> Input:
    """An input about which nothing is known."""
    return MAKERS[kind](origin) if kind in MAKERS else Input(origin, kind, FACTS_OF[kind]())


def sites(uses: str) -> list[Site]:
    """The node with nothing connected, and with every port fed by unknown things of each kind."""
    ports = STAGES[uses].inputs
    maker = site("load", node="x")
    fed = [
        site(
            uses,
            maker,
            node=uses,
            **{port.name: [blank(pick(port.kinds), "x.out")] * (1 + port.many) for port in ports},
        )
        for pick in (min, max)
    ]
    return [site(uses), *fed, *(site(uses, each, **each.inputs) for each in fed)]


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
def test_nothing_known_is_never_an_accusation(rule: Registration) -> None:
    for uses in STAGES:
        for finding in (each for at in sites(uses) for each in rule.load()().check(at)):
            assert isinstance(finding, Finding), uses
            assert finding.code == rule.load().code, uses
            level = (finding.level, finding.certainty)
            assert rule.name in ONE_ORIGIN or level == (Level.NOTE, Certainty.UNKNOWN), (uses, finding)


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
def test_every_rule_explains_itself(rule: Registration) -> None:
    found = rule.load()
    assert issubclass(found, Rule)
    assert re.fullmatch("H[0-9]{3}", found.code)
    assert rule.summary.lower() == found.title.lower(), "the summary in lists is the title"
    sentences = re.findall(r"[.?!](?:\s|$)", found.text())
    assert len(sentences) >= 2, "what goes wrong, and how it shows"


def test_light_modules_import_nothing_heavy() -> None:
    modules = [
        *(registration.target.partition(":")[0] for registration in RULES.values()),
        "posttrain_plugins.evaluation.evaluate",
        "posttrain_plugins.evaluation.gate",
        "posttrain_plugins.data.best_of_n",
        "posttrain_plugins.rewards.exact",
    ]
    heavy = ["torch", "transformers", "numpy"]
    code = f"import sys, {', '.join(modules)}\nprint([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
