"""How the command line speaks: text to stderr or stdout, JSON for machines, errors without tracebacks."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain.errors import PosttrainError

if TYPE_CHECKING:
    from rich.console import Console

Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Workspace = Annotated[
    Path, typer.Option(envvar="POSTTRAIN_WORKSPACE", help="Where runs and artifacts are kept.")
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY.PATH=VALUE", help="Override one value, such as stages.dpo.with.loss.beta=0.2."
    ),
]
DEFAULT_WORKSPACE = Path(".posttrain")


@cache
def console() -> Console:
    """Return the console of standard output."""
    from rich.console import Console

    return Console(highlight=False)


def print_json(value: Any) -> None:
    """Print one JSON document on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")


def say(text: str = "") -> None:
    """Print a line on standard output."""
    typer.echo(text)


def complain(error: PosttrainError) -> None:
    """Print an error for people on standard error."""
    typer.echo(typer.style("error: ", fg="red", bold=True) + printable(str(error)), err=True)


def printable(text: str) -> str:
    """Strip control characters from text that may come from data or models."""
    return "".join(character for character in text if character in "\n\t" or character.isprintable())
