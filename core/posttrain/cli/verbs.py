"""The verbs that plugins add: functions, and groups of them, that are imported when their verb is called."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import typer
import typer.core
import typer.main

from posttrain.contracts.registration import Group, Registration
from posttrain.errors import PluginError, PosttrainError
from posttrain.registry.catalogue import Catalogue
from posttrain.registry.isolation import Failure, isolated
from posttrain.registry.validation import faults

_UNDERSTOOD = (PosttrainError, OSError, typer.Exit, typer.Abort, typer.BadParameter)
"""What the command line knows how to end with."""


@dataclass(frozen=True)
class Owner:
    """Whose a verb is, to blame what it raises on.

    Args:
        label: The plugin as people know it.
        package: Its top-level module.
    """

    label: str
    package: str


class PluginVerb(typer.core.TyperCommand):
    """Stands for a verb until it is called; then its target is imported and parses the arguments.

    Args:
        name: The verb.
        summary: What it does, for the list of verbs.
        words: The verb with what stands before it, such as `data convert`.
        load: Imports the function, or the registrations of a group of verbs.
        owner: The plugin.
    """

    def __init__(self, name: str, summary: str, words: str, load: Callable[[], Any], owner: Owner) -> None:
        super().__init__(name, help=summary, short_help=summary, rich_markup_mode=None)
        self._words = words
        self._load = load
        self._owner = owner

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        """Return the context of the command that the target makes.

        Raises:
            PluginError: The target cannot be imported, or is none that a command can be made of.
        """
        return self.made().make_context(info_name, args, parent, **extra)

    def made(self) -> Any:
        """Import the target and return its command, or the group of its verbs.

        Raises:
            PluginError: As `make_context`.
        """
        target = self._load()
        if not callable(target):
            return self._group(target)
        whose = f"the verb {self._words!r} of {self._owner.label}"
        name = str(self.name)
        made = isolated(whose, self._owner.package, lambda: _command(name, _blamed(target, whose)))
        if isinstance(made, Failure):
            raise _broken(f"{whose} is no command: {made.error}", made.where)
        return made

    def _group(self, registrations: Sequence[Registration]) -> Any:
        verbs = [
            PluginVerb(
                each.name,
                each.summary,
                f"{self._words} {each.name}",
                functools.partial(_imported, each, f"{self._words} {each.name}", self._owner),
                self._owner,
            )
            for each in registrations
        ]
        return typer.core.TyperGroup(
            name=self.name, commands=verbs, help=self.help, no_args_is_help=True, rich_markup_mode=None
        )


def plugin_verb(name: str, catalogue: Catalogue) -> PluginVerb:
    """Return the stand-in of a verb that a plugin registers; imports nothing of it."""
    entry = catalogue.entry(Group.COMMAND, name)
    owner = Owner(entry.plugin.label, entry.plugin.package)
    load = functools.partial(catalogue.load, Group.COMMAND, name)
    return PluginVerb(name, entry.registration.summary, name, load, owner)


def _imported(registration: Registration, words: str, owner: Owner) -> Any:
    """Import the target of a verb in a group."""
    whose = f"the verb {words!r} of {owner.label}"
    target = isolated(whose, owner.package, registration.load)
    if isinstance(target, Failure):
        raise _broken(f"{whose} cannot be imported: {target.error}", target.where)
    for fault in faults(Group.COMMAND, target):
        raise PluginError(f"{whose} breaks the contract: {fault}", where=str(registration.target))
    return target


def _command(name: str, function: Callable[..., Any]) -> Any:
    """Make a command of a function; its attribute `context_settings`, where it has one, says how it parses."""
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    single.command(name=name, context_settings=getattr(function, "context_settings", None))(function)
    return typer.main.get_command(single)


def _blamed(function: Callable[..., Any], whose: str) -> Callable[..., Any]:
    """Return the function with its unexpected exceptions turned into errors that name the plugin."""

    @functools.wraps(function)
    def verb(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except _UNDERSTOOD:
            raise
        except Exception as error:
            raise _failed(whose, error) from error

    return verb


def _failed(whose: str, error: Exception) -> PluginError:
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = None if place is None else f"{place.tb_frame.f_code.co_filename}:{place.tb_lineno}"
    return _broken(f"{whose} failed: {type(error).__name__}: {error}", where)


def _broken(message: str, where: str | None) -> PluginError:
    return PluginError(message, where=where, fix="POSTTRAIN_TRACEBACK=1 shows all of the way there")
