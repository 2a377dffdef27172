"""`posttrain plugins new`: a package with one plugin, its test and what it takes to install it."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from posttrain.cli.output import say
from posttrain.contracts.registration import Group
from posttrain.errors import SpecError

_MAKES: Mapping[str, str] = {
    "common/pyproject.toml.template": "pyproject.toml",
    "$kind/README.md.template": "README.md",
    "$kind/module.py.template": "$module.py",
    "$kind/test.py.template": "tests/test_$short.py",
}
"""The templates, and the files they become."""
_NAME = re.compile(r"([a-z][a-z0-9_.-]*/)?[a-z][a-z0-9_.-]*")

_OWN = frozenset({"plugins", "pipelines", "builtin", "flows"})
"""Names whose package would be taken for one of posttrain's own."""


class PluginKind(StrEnum):
    """What a new package may hold."""

    LOSS = "loss"
    REWARD = "reward"
    TRAINER = "trainer"


def new(
    kind: Annotated[PluginKind, typer.Argument(help="What the package is to hold.")],
    name: Annotated[str, typer.Argument(help="The name that pipelines will use, such as acme/simpo2.")],
    directory: Annotated[
        Path | None,
        typer.Option(help="Where to write it; posttrain-NAME here by default.", show_default=False),
    ] = None,
) -> None:
    """Write a package with a plugin that works, to be changed: module, test, pyproject.toml, README."""
    values = _values(kind, name)
    _require_free(kind, name)
    target = directory or Path(values["distribution"])
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise SpecError(
            "there is something already",
            where=str(target),
            expected="a directory that does not exist yet, or an empty one",
            fix="name another one with --directory",
        )
    for template, file in _MAKES.items():
        source = files("posttrain.cli") / "templates" / Template(template).substitute(values)
        written = target / Template(file).substitute(values)
        written.parent.mkdir(parents=True, exist_ok=True)
        text = Template(source.read_text(encoding="utf-8")).substitute(values)
        written.write_text(text, encoding="utf-8")
    say(f"wrote {target}; to use it and to test it:")
    say(f"  pip install -e '{target}[test]' && pytest {target}")
    say(f"  posttrain plugins info {name}")


def _values(kind: PluginKind, name: str) -> dict[str, str]:
    """Return what the templates ask for."""
    from posttrain import __version__
    from posttrain.registry.hooks import API_VERSION

    words = re.findall(r"[a-z0-9]+", name)
    if not _NAME.fullmatch(name) or "_".join(words) in _OWN:
        raise SpecError(
            "this cannot be the name of a plugin",
            where="NAME",
            found=name,
            expected="lower-case letters, digits, `-`, `_` and `.`, after a namespace where that helps: acme/simpo2",
        )
    short = re.findall(r"[a-z0-9]+", name.rpartition("/")[2])
    cls = "".join(word.capitalize() for word in short)
    return {
        "kind": kind.value,
        "name": name,
        "short": "_".join(short),
        "cls": f"{cls}{kind.value.capitalize()}" if keyword.iskeyword(cls) or _mentioned(cls, kind) else cls,
        "module": "_".join(["posttrain", *words]),
        "distribution": "-".join(["posttrain", *words]),
        "entry": "-".join(words),
        "version": __version__,
        "api": str(API_VERSION),
        "next_api": str(API_VERSION + 1),
    }


def _mentioned(cls: str, kind: PluginKind) -> bool:
    """Whether the templates speak of something of that name, such as a class that they import."""
    folder = files("posttrain.cli") / "templates" / kind.value
    text = "".join(
        (folder / f"{each}.py.template").read_text(encoding="utf-8") for each in ("module", "test")
    )
    return not {cls, f"{cls}Options"}.isdisjoint(re.findall(r"\w+", text))


def _require_free(kind: PluginKind, name: str) -> None:
    """Refuse a name that a plugin has: pipelines could not tell the two apart."""
    from posttrain.registry.discovery import discover
    from posttrain.registry.status import namespace

    catalogue = discover()
    group = namespace(Group(kind.value))
    for entry in catalogue.entries():
        if namespace(entry.group) is group and entry.registration.name == name:
            raise SpecError(
                f"there is a {entry.group} {name!r} already",
                where="NAME",
                found=entry.plugin.label,
                fix=f"choose another name, or put it into a namespace of yours: 'yours/{name.rpartition('/')[2]}'",
            )
