"""The command: its verbs, those that plugins add, and the one place where errors meet the shell.

Every verb imports what it needs when it is called, so that `posttrain --help` stays fast.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import typer
import typer.core

from posttrain.cli import curves, history, plugins, running, scaffold, storage
from posttrain.cli.output import complain, mute, print_json
from posttrain.errors import Interrupted, PosttrainError, SpecError, StoreError

if TYPE_CHECKING:
    from posttrain.registry.catalogue import Catalogue

_TRACE = "POSTTRAIN_TRACEBACK"
_COMPLETE = "_POSTTRAIN_COMPLETE"
"""Set by the script of `posttrain completion` when the shell asks for candidates."""


class PosttrainGroup(typer.core.TyperGroup):
    """The top level: the core's verbs first, then those of plugins."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return all verbs."""
        return [*self.commands, *(name for name in _plugin_verbs(_catalogue()) if name not in self.commands)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a verb of the core, or the stand-in of a plugin's."""
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        catalogue = _catalogue()
        if cmd_name not in _plugin_verbs(catalogue):
            return None
        from posttrain.cli.verbs import plugin_verb

        return plugin_verb(cmd_name, catalogue)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the verb that the arguments name; an unknown one is explained with what plugins have to do with it.

        Raises:
            PluginError: Several plugins claim the verb.
            SpecError: There is no such verb.
        """
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            raise _unknown(name, self.list_commands(ctx))
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the verb; neither an interrupt, which a run handles itself, nor a lost reader is a traceback."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted("interrupted") from None
        except BrokenPipeError:
            mute()
            return None


def _catalogue() -> Catalogue:
    from posttrain.registry.discovery import discover

    return discover()


def _plugin_verbs(catalogue: Catalogue) -> list[str]:
    """Return the verbs of plugins."""
    from posttrain.contracts.registration import Group

    return catalogue.names(Group.COMMAND)


def _unknown(name: str, verbs: list[str]) -> PosttrainError:
    from posttrain.contracts.registration import Group
    from posttrain.wording import did_you_mean

    catalogue = _catalogue()
    for conflict in catalogue.conflicts():
        if (conflict.group, conflict.name) == (Group.COMMAND, name):
            return conflict.error()
    advice = [did_you_mean(name, verbs), *catalogue.troubles(denied=True)]
    return SpecError(
        "there is no such verb",
        where="posttrain",
        found=name,
        expected=f"one of {', '.join(verbs)}",
        fix="; ".join(filter(None, advice)) or None,
    )


app = typer.Typer(
    cls=PosttrainGroup,
    no_args_is_help=True,
    add_completion=False,
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
    curves.curves,
    history.explain,
    history.diff,
    scaffold.init,
    scaffold.recipes,
    scaffold.schema,
    scaffold.doctor,
    scaffold.completion,
):
    app.command()(_function)
app.add_typer(plugins.app, name="plugins")
app.add_typer(storage.app, name="store")


def run() -> None:
    """Run the command line and exit.

    Errors that people can act on are shown without a traceback, with `--json` also as `{"error": …}` on standard
    output; `POSTTRAIN_TRACEBACK=1` shows where they came from.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    if _COMPLETE in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]  # imported there, not declared

        completion_init()
    try:
        app(prog_name="posttrain")
    except PosttrainError as error:
        _fail(error)
    except BrokenPipeError:
        mute()
    except OSError as error:
        _fail(_storage(error))


def _fail(error: PosttrainError) -> None:
    if os.environ.get(_TRACE):
        raise error
    complain(error)
    if "--json" in sys.argv[1:]:
        print_json({"error": error.as_dict()})
    sys.exit(int(error.exit_code))


def _storage(error: OSError) -> PosttrainError:
    """Return what the system refused as an error with a place and a way out."""
    from pathlib import Path

    from posttrain.artifacts.files import guarded

    try:
        with guarded(Path(), "go on"):
            raise error
    except StoreError as known:
        return known
