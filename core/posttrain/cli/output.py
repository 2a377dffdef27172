"""How the command line speaks: text or JSON on standard output, errors without tracebacks.

A reader that goes away (`posttrain run … | head`) ends the text and not the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Voice:
    """How warnings, and errors of stages, are told by a verb that has words of its own.

    Args:
        word: Says a warning or a part of an error.
        place: Says where an error is.
        again: How people call running once more.
    """

    word: Callable[[str], str] = str
    place: Callable[[str], str] = str
    again: str = "`posttrain run` again"


AS_WRITTEN = Voice()
"""Tells things in the words of the pipeline."""


@cache
def console() -> Console:
    """Return the console of standard output. It takes text as it is: `dpo[seed=1]` is no markup."""
    from rich.console import Console

    class Patient(Console):
        def on_broken_pipe(self) -> None:
            mute()

    return Patient(highlight=False, markup=False, emoji=False)


def mute() -> None:
    """Send standard output nowhere: whoever read it is gone."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def say(text: str = "") -> None:
    """Print a line on standard output, without control characters."""
    try:
        sys.stdout.write(printable(text) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        mute()


def print_json(value: Any) -> None:
    """Print one JSON document on standard output, in ASCII."""
    text = json.dumps(value, indent=2, default=str)
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        mute()


@contextlib.contextmanager
def reserved(as_json: bool) -> Iterator[None]:
    """With `--json`, keep standard output for the document: what plugins print goes to standard error."""
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield


def complain(error: PosttrainError) -> None:
    """Print an error for people on standard error."""
    typer.echo(typer.style("error: ", fg="red", bold=True) + printable(str(error)), err=True)


def warn(lines: Sequence[str], voice: Voice = AS_WRITTEN) -> None:
    """Print warnings for people on standard error."""
    for line in lines:
        typer.echo(typer.style("warning: ", fg="yellow", bold=True) + printable(voice.word(line)), err=True)


def remark(lines: Sequence[str]) -> None:
    """Print for people, on standard error, what a command took something for."""
    for line in lines:
        typer.echo(printable(line), err=True)


def printable(text: str) -> str:
    """Strip control characters from text that may come from data or models."""
    return "".join(character for character in text if character in "\n\t" or character.isprintable())
