"""Hand-off rules by their codes: one code, one rule, and what `posttrain explain` says about it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from helpers.planning import command
from helpers.plugins import catalogue_of, plugin

from posttrain.artifacts.kinds import DatasetFacts, Kind
from posttrain.contracts.registration import Group, Registration
from posttrain.contracts.rule import Rule, Site
from posttrain.contracts.stage import Certainty, Finding, Input, Level, Port, Stage
from posttrain.errors import PluginError, SpecError
from posttrain.planning.graph import build_graph
from posttrain.planning.handoffs import Handoffs
from posttrain.planning.parsing import parse, resolved
from posttrain.planning.source import Source
from posttrain.registry.catalogue import Catalogue
from posttrain.registry.discovery import discover
from posttrain.registry.rules import require_own_code, rulebook, ruling


class Odd(Rule):
    """Something is odd.

    It shows when you look.
    """

    code = "ACME01"
    title = "something odd"
    level = Level.WARNING
    fix = "look again"

    def check(self, site: Site) -> Iterable[Finding]:
        yield self.finding(f"{site.node} is odd")


class Same(Odd):
    """The same code."""


class Reserved(Odd):
    """A code of the built-in rules."""

    code = "H900"


class Nothing(Stage):
    """Does nothing."""

    target = "some.module:run"

    def outputs(self, config: Any) -> tuple[Port, ...]:
        return (Port("data", frozenset({Kind.DATASET})),)


def rules(**named: type[Rule]) -> Catalogue:
    return catalogue_of(
        rules=[Registration(name.replace("_", "-"), "s", rule) for name, rule in named.items()]
    )


def test_the_rulebook_is_sorted_by_code() -> None:
    class Later(Odd):
        """Later."""

        code = "ACME02"

    book = rulebook(rules(a=Later, b=Odd))
    assert {code: found.name for code, found in book.items()} == {"ACME01": "b", "ACME02": "a"}
    assert ruling(rules(b=Odd), "ACME01").rule is Odd


def test_an_unknown_code_is_answered_with_a_near_one() -> None:
    with pytest.raises(SpecError) as caught:
        ruling(rules(b=Odd), "ACME0")
    assert (caught.value.found, caught.value.fix) == ("ACME0", "did you mean `ACME01`?")


def test_a_code_belongs_to_one_rule() -> None:
    catalogue = rules(first=Odd, second=Same)
    assert require_own_code(catalogue, "first") is Odd
    with pytest.raises(PluginError, match=r"the rule second of .* has the code of the rule first") as caught:
        require_own_code(catalogue, "second")
    assert caught.value.found == "ACME01"


def test_the_letters_of_built_in_rules_are_theirs() -> None:
    with pytest.raises(PluginError, match="only built-in rules may have"):
        require_own_code(rules(mine=Reserved), "mine")


def test_no_two_built_in_rules_share_a_code() -> None:
    catalogue = discover()
    names = catalogue.names(Group.RULE)
    codes = [require_own_code(catalogue, name).code for name in names]
    assert len(set(codes)) == len(names) >= 40


def findings(*registered: Registration, tmp_path: Path) -> list[Finding]:
    stages = [Registration("nothing", "s", Nothing)]
    catalogue = discover(extra=[plugin("acme", stages=stages, rules=registered)], installed=False)
    source = Source("pipeline", {"stages": {"a": {"uses": "nothing"}}})
    graph = build_graph(resolved(parse(source), source), catalogue, tmp_path)
    return Handoffs(graph, catalogue).findings(graph.nodes["a"], {})


def test_findings_carry_name_and_code(tmp_path: Path) -> None:
    class Liar(Odd):
        """Says that it is another rule."""

        code = "ACME07"

        def check(self, site: Site) -> Iterable[Finding]:
            yield Finding("somebody-else", Level.NOTE, Certainty.VERIFIED, "hm", code="H001")

    (found,) = findings(Registration("liar", "s", Liar), tmp_path=tmp_path)
    assert (found.rule, found.code, found.node, found.label) == ("liar", "ACME07", "a", "ACME07 liar")


def test_a_second_rule_with_a_code_is_an_error_and_not_silent(tmp_path: Path) -> None:
    first, second = Registration("first", "s", Odd), Registration("second", "s", Same)
    found = {each.rule: each for each in findings(first, second, tmp_path=tmp_path)}
    assert (found["first"].level, found["first"].message) == (Level.WARNING, "a is odd")
    assert (found["second"].level, found["second"].certainty) == (Level.ERROR, Certainty.VERIFIED)


def test_a_finding_is_verified_when_all_its_facts_are() -> None:
    real, guessed = (Input("a.data", Kind.DATASET, DatasetFacts(), artifact) for artifact in (object(), None))
    rule = Odd()
    assert rule.finding("m", real).certainty is Certainty.VERIFIED
    assert rule.finding("m", real, guessed).certainty is Certainty.PREDICTED
    found = rule.finding("m", real, port="p", level=Level.ERROR, fix="f")
    assert (found.level, found.port, found.fix, found.code) == (Level.ERROR, "p", "f", "ACME01")
    assert (rule.finding("m").fix, rule.unknown("u").level) == ("look again", Level.NOTE)
    assert rule.unknown("u").certainty is Certainty.UNKNOWN


def test_explain_prints_one_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = command("explain", "H012")
    rule = ruling(discover(), "H012").rule
    assert told.code == 0
    assert told.out.startswith(f"H012 end-of-turn-undeclared: {rule.title} (warning)\n")
    assert rule.text() in told.out and f"fix: {rule.fix}" in told.out
    wrong = command("explain", "H0123")
    assert wrong.code == 2 and "no rule has this code" in wrong.err and "did you mean `H0" in wrong.err
    assert not (tmp_path / ".posttrain").exists(), "explaining a rule writes nothing"


def test_explain_lists_the_rules_and_wants_something_to_explain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    listed = command("explain", "--rules").out.splitlines()
    book = rulebook(discover())
    assert [line.split()[0] for line in listed] == list(book)
    told = json.loads(command("explain", "--rules", "--json").out)
    assert {each["code"] for each in told} == set(book)
    assert set(told[0]) == {"code", "name", "title", "level", "text", "fix", "plugin"}
    nothing = command("explain")
    assert nothing.code == 2 and "say what to explain" in nothing.err


LOCAL = '''
from posttrain import Level, Registration, Rule, hookimpl

POSTTRAIN_API = ">=1,<2"


class Mine(Rule):
    """Mine alone."""

    code, title, level, fix = "MINE01", "mine", Level.NOTE, "nothing"

    def check(self, site):
        yield self.finding(f"{site.node} is mine")


@hookimpl
def posttrain_rules():
    return [Registration("mine", "mine", Mine)]
'''


def test_explain_knows_the_rules_of_a_local_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rules.py").write_text(LOCAL)
    assert command("explain", "MINE01").code == 2
    told = command("explain", "MINE01", "--file", "rules.py")
    assert told.code == 0 and told.out == "MINE01 mine: mine (note)\n\nMine alone.\n\nfix: nothing\n"


PIPELINE = """
name: mine
plugins: [./rules.py]
stages:
  task: {uses: data.synthetic, with: {generator: reverse, rows: 8}}
"""


def test_the_plan_shows_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rules.py").write_text(LOCAL)
    Path("mine.yaml").write_text(PIPELINE)
    assert "task: task is mine [MINE01 mine]" in command("plan", "mine.yaml").out
    (node,) = json.loads(command("plan", "mine.yaml", "--json").out)["nodes"]
    (found,) = node["findings"]
    assert (found["rule"], found["code"]) == ("mine", "MINE01")
