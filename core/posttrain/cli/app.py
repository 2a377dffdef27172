"""The command: its verbs, those that plugins add, and the one place where errors meet the shell.

Every verb imports what it needs when it is called, so that `posttrain --help` stays fast.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import typer
import typer.core
import typer.main

from posttrain.cli import history, plugins, running, scaffold, storage
from posttrain.cli.output import complain
from posttrain.errors import PosttrainError

_TRACE = "POSTTRAIN_TRACEBACK"


class PluginCommand(typer.core.TyperCommand):
    """A verb that a plugin adds; its function is imported when it is called."""

    def __init__(self, name: str, summary: str) -> None:
        super().__init__(name, help=summary, short_help=summary, rich_markup_mode=None)

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        """Import the function and let the command made of it parse the arguments."""
        from posttrain.contracts.registration import Group
        from posttrain.registry.discovery import discover

        function = discover().load(Group.COMMAND, str(self.name))
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        single.command(name=str(self.name))(function)
        return typer.main.get_command(single).make_context(info_name, args, parent, **extra)


class PosttrainGroup(typer.core.TyperGroup):
    """The top level: the core's verbs first, then those of plugins."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return all verbs."""
        return [*self.commands, *(name for name in _plugin_verbs() if name not in self.commands)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a verb of the core, or the stand-in of a plugin's."""
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        summary = _plugin_verbs().get(cmd_name)
        return None if summary is None else PluginCommand(cmd_name, summary)


def _plugin_verbs() -> dict[str, str]:
    from posttrain.contracts.registration import Group
    from posttrain.registry.discovery import discover

    catalogue = discover()
    return {
        name: catalogue.entry(Group.COMMAND, name).registration.summary
        for name in catalogue.names(Group.COMMAND)
    }


app = typer.Typer(
    cls=PosttrainGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Pipelines for the alignment of language models: data, SFT, preferences, evaluation, promotion.",
)


@app.callback(invoke_without_command=True)
def _top(
    version: bool = typer.Option(False, "--version", is_eager=True, help="Print the version and exit."),
) -> None:
    if version:
        from posttrain import __version__

        typer.echo(f"posttrain {__version__}")
        raise typer.Exit()


for _function in (
    running.run,
    running.plan,
    running.resume,
    history.status,
    history.explain,
    history.diff,
    scaffold.init,
    scaffold.recipes,
    scaffold.schema,
    scaffold.doctor,
):
    app.command()(_function)
app.add_typer(plugins.app, name="plugins")
app.add_typer(storage.app, name="store")


def run() -> None:
    """Run the command line and exit; `POSTTRAIN_TRACEBACK=1` shows where an error came from."""
    try:
        app(prog_name="posttrain")
    except PosttrainError as error:
        if os.environ.get(_TRACE):
            raise
        complain(error)
        sys.exit(int(error.exit_code))
