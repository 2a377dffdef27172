"""Verbs that plugins add: single ones and groups, made when they are called."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from helpers.planning import command
from helpers.plugins import install, write_distribution

SOURCE = '''
    """Verbs for a test."""
    import sys
    import typer
    from posttrain import Registration, hookimpl

    POSTTRAIN_API = ">=1,<2"
    VERBS = (
        Registration("greet", "Say hello", "acme_greet:greet"),
        Registration("fall", "Raise something", "acme_greet:fall"),
        Registration("gone", "Not there", "acme_nowhere:gone"),
        Registration("odd", "No function", "acme_greet:ODD"),
        Registration("inner", "A group in the group", "acme_greet:INNER"),
    )

    @hookimpl
    def posttrain_commands():
        return [Registration("acme", "What acme does", "acme:VERBS")]
'''
GREET = '''
    """The functions, which are heavy."""
    from typing import Annotated
    import typer
    from posttrain import Registration

    ODD = 3
    INNER = (Registration("deep", "Say hello from below", "acme_greet:greet"),)

    def greet(name: Annotated[str, typer.Argument(help="Whom.")], loud: bool = False) -> None:
        typer.echo(f"hello {name.upper() if loud else name}")

    def fall() -> None:
        raise RuntimeError("over an edge")
'''


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "site"
    root.mkdir()
    write_distribution(root, "acme", SOURCE)
    (root / "acme_greet.py").write_text(textwrap.dedent(GREET))
    install(root, monkeypatch)
    return root


def test_a_group_lists_its_verbs_in_order_and_imports_none_of_them() -> None:
    told = command("acme", "--help")
    assert told.code == 0
    lines = [line.split() for line in told.out.partition("Commands:")[2].splitlines() if line.strip()]
    assert [line[0] for line in lines] == ["greet", "fall", "gone", "odd", "inner"]
    assert lines[0][1:] == ["Say", "hello"]
    assert "acme" in sys.modules and "acme_greet" not in sys.modules


def test_the_list_of_verbs_does_not_import_the_group() -> None:
    told = command("--help")
    assert told.code == 0 and "What acme does" in told.out
    assert "acme_greet" not in sys.modules


def test_a_verb_of_a_group_parses_its_own_arguments() -> None:
    assert command("acme", "greet", "you", "--loud").out == "hello YOU\n"
    wrong = command("acme", "greet")
    assert wrong.code == 2 and "name" in wrong.err.lower() and "posttrain acme greet" in wrong.err


def test_groups_may_hold_groups() -> None:
    assert command("acme", "inner", "deep", "you").out == "hello you\n"


def test_a_group_without_a_verb_shows_its_verbs() -> None:
    told = command("acme")
    assert told.code == 2 and "greet" in told.out + told.err


def test_an_unknown_verb_of_a_group_has_a_suggestion() -> None:
    told = command("acme", "gret")
    assert told.code == 2 and "greet" in told.err


@pytest.mark.parametrize(
    ("verb", "told"),
    [
        ("fall", "the verb 'acme fall' of acme 1.0 failed: RuntimeError: over an edge"),
        ("gone", "the verb 'acme gone' of acme 1.0 cannot be imported: ModuleNotFoundError"),
        ("odd", "the verb 'acme odd' of acme 1.0 breaks the contract: it must be a function"),
    ],
)
def test_what_goes_wrong_is_the_plugins(verb: str, told: str) -> None:
    result = command("acme", verb)
    assert result.code == 2
    assert told in result.err and "Traceback" not in result.err


@pytest.mark.parametrize(
    ("verbs", "told"),
    [
        ("()", "a group of verbs must be a tuple of posttrain.Registration"),
        ("(greet,)", "a group of verbs must be a tuple of posttrain.Registration"),
        (
            "(Registration('a', 'One', 'x:y'), Registration('a', 'Another', 'x:z'))",
            "the verb 'a' is there 2 times",
        ),
    ],
)
def test_a_group_that_is_none_is_refused(verbs: str, told: str, site: Path) -> None:
    text = (site / "acme.py").read_text()
    (site / "acme.py").write_text(f"{text}\ndef greet(): ...\nVERBS = {verbs}\n")
    result = command("acme", "--help")
    assert result.code == 2 and told in result.err


@pytest.mark.parametrize(
    ("words", "found"), [("posttrain acme gr", ["greet"]), ("posttrain acme greet --l", ["--loud"])]
)
def test_a_shell_completes_the_verbs_of_a_group_and_their_options(
    words: str, found: list[str], site: Path
) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(site),
        "_POSTTRAIN_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    program = "from posttrain.cli.app import run; run()"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == found
