"""The verbs that plugins add: each is a function that is imported when its verb is called."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import typer
import typer.core
import typer.main

from posttrain.contracts.registration import Group
from posttrain.errors import PluginError, PosttrainError
from posttrain.registry.catalogue import Catalogue
from posttrain.registry.isolation import Failure, isolated

_UNDERSTOOD = (PosttrainError, OSError, typer.Exit, typer.Abort, typer.BadParameter)
"""What the command line knows how to end with."""


class PluginVerb(typer.core.TyperCommand):
    """Stands for a plugin's verb until it is called; then the function is imported and parses the arguments."""

    def __init__(self, name: str, summary: str, catalogue: Catalogue) -> None:
        super().__init__(name, help=summary, short_help=summary, rich_markup_mode=None)
        self._catalogue = catalogue

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        """Return the context of the command that the function makes.

        Raises:
            PluginError: The function cannot be imported, or is none that a command can be made of.
        """
        name = str(self.name)
        function = self._catalogue.load(Group.COMMAND, name)
        entry = self._catalogue.entry(Group.COMMAND, name)
        whose = f"the verb {name!r} of {entry.plugin.label}"
        made = isolated(whose, entry.plugin.package, lambda: _command(name, _blamed(function, whose)))
        if isinstance(made, Failure):
            raise _broken(f"{whose} is no command: {made.error}", made.where)
        return made.make_context(info_name, args, parent, **extra)


def _command(name: str, function: Callable[..., Any]) -> Any:
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    single.command(name=name)(function)
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
