"""`posttrain plugins`: what is installed, what it offers and what is wrong with it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain.cli.output import Json, console, print_json, say
from posttrain.cli.packages import new
from posttrain.contracts.registration import Group
from posttrain.errors import ExitCode, PluginError
from posttrain.registry.catalogue import Catalogue, Entry
from posttrain.registry.discovery import discover
from posttrain.registry.rules import require_own_code
from posttrain.registry.status import PluginStatus, Status

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer(help="Show, explain, check and begin plugins.", no_args_is_help=True)

Files = Annotated[
    list[Path] | None, typer.Option("--file", help="A local plugin file to look at too.", show_default=False)
]


@app.command("list")
def list_plugins(
    group: Annotated[
        str | None,
        typer.Argument(help=f"One of {', '.join(Group)}; all of them when left out.", show_default=False),
    ] = None,
    as_json: Json = False,
    files: Files = None,
) -> None:
    """List everything that plugins register, with its paper, and the plugins that are not used.

    With a group or `--json` it also says what is broken, and of which family losses and trainers are. For that it
    imports losses, trainers and what is not built in.
    """
    catalogue = discover(files or ())
    entries = [entry for entry in catalogue.entries() if group in (None, entry.group)]
    if group is not None and group not in list(Group):
        raise _no_group(group)
    if as_json:
        print_json(
            {
                "plugins": [plugin.as_dict() for plugin in catalogue.plugins],
                "registrations": [_summary(entry, catalogue) for entry in entries],
            }
        )
        return
    _print(*_overview(entries, catalogue, imported=group is not None))
    for line in catalogue.troubles(denied=True):
        say(line)


@app.command()
def info(
    name: Annotated[str, typer.Argument(help="The name of a stage, loss, reward, … or of a plugin.")],
    as_json: Json = False,
    files: Files = None,
) -> None:
    """Show what a name stands for in every group: options, ports, reference."""
    catalogue = discover(files or ())
    plugins = [plugin for plugin in catalogue.plugins if name in (plugin.name, plugin.distribution)]
    entries = [entry for entry in catalogue.entries() if _goes_by(entry, name, catalogue)]
    if not entries and not plugins:
        raise _unknown(name, catalogue)
    details = [_details(entry, catalogue) for entry in entries]
    if as_json:
        print_json({"plugins": [plugin.as_dict() for plugin in plugins], "registrations": details})
        return
    for plugin in plugins:
        say(_plugin_text(plugin))
    for detail in details:
        _print_details(detail)


@app.command()
def check(
    everything: Annotated[
        bool, typer.Option("--all", help="Load what the built-in plugins register as well.")
    ] = False,
    as_json: Json = False,
    files: Files = None,
) -> None:
    """Load what plugins register, check it against the contracts and report all problems."""
    catalogue = discover(files or ())
    problems = list(_problems(catalogue, everything))
    if as_json:
        plugins = [plugin.as_dict() for plugin in catalogue.plugins]
        print_json({"plugins": plugins, "problems": problems, "warnings": catalogue.warnings})
    else:
        for plugin in catalogue.plugins:
            say(f"{plugin.status:<12} {plugin.name} of {plugin.origin}")
        for warning in catalogue.warnings:
            say(f"warning: {warning}")
        for problem in problems:
            say(f"problem: {problem}")
    if problems:
        raise typer.Exit(ExitCode.FAILED)


def _problems(catalogue: Catalogue, everything: bool) -> Iterator[str]:
    for plugin in catalogue.plugins:
        if plugin.status not in (Status.LOADED, Status.BLOCKED) and plugin.trouble is not None:
            yield plugin.trouble
    for conflict in catalogue.conflicts():
        yield str(conflict.error())
    for group in Group:
        for name in catalogue.names(group):
            if everything or not catalogue.entry(group, name).plugin.builtin:
                error = _load_error(catalogue, group, name)
                if error is not None:
                    yield str(error)


def _load_error(catalogue: Catalogue, group: Group, name: str) -> PluginError | None:
    try:
        catalogue.load(group, name)
        if group is Group.RULE:
            require_own_code(catalogue, name)
    except PluginError as error:
        return error
    return None


def _state(entry: Entry, catalogue: Catalogue) -> str:
    clashing = [each for conflict in catalogue.conflicts() for each in conflict.entries]
    return "ambiguous" if any(each is entry for each in clashing) else entry.plugin.status.value


def _imported(entry: Entry, catalogue: Catalogue) -> tuple[str, str | None]:
    """Return the state of an entry, and of a loss or a trainer its family.

    Both need an import; nothing else that is built in is imported.
    """
    state = _state(entry, catalogue)
    has_family = entry.group in (Group.TRAINER, Group.LOSS)
    if state == "ambiguous" or (entry.plugin.builtin and not has_family):
        return state, None
    if _load_error(catalogue, entry.group, entry.registration.name) is not None:
        return "broken", None
    return state, str(catalogue.load(entry.group, entry.registration.name).family) if has_family else None


def _summary(entry: Entry, catalogue: Catalogue) -> dict[str, Any]:
    item = entry.registration
    state, family = _imported(entry, catalogue)
    return {
        "group": entry.group.value,
        "name": item.name,
        "family": family,
        "summary": item.summary,
        "reference": item.reference,
        "numerics": item.numerics,
        "target": item.target if isinstance(item.target, str) else repr(item.target),
        "plugin": entry.plugin.name,
        "distribution": entry.plugin.distribution,
        "version": entry.plugin.version,
        "file": entry.plugin.file,
        "status": state,
    }


def _goes_by(entry: Entry, name: str, catalogue: Catalogue) -> bool:
    return name in catalogue.aliases(entry.group, entry.registration.name)


def _unknown(name: str, catalogue: Catalogue) -> PluginError:
    from posttrain.wording import did_you_mean

    known = [entry.registration.name for entry in catalogue.entries()]
    advice = [did_you_mean(name, known), *catalogue.troubles(denied=True)]
    fix = "; ".join(filter(None, advice)) or "`posttrain plugins list` shows every name"
    return PluginError(f"nothing is registered as {name!r}", found=name, fix=fix)


def _details(entry: Entry, catalogue: Catalogue) -> dict[str, Any]:
    summary = _summary(entry, catalogue)
    if summary["status"] == "ambiguous":
        return {**summary, "error": "several plugins claim the name"}
    error = _load_error(catalogue, entry.group, entry.registration.name)
    if error is not None:
        return {**summary, "error": str(error)}
    target = catalogue.load(entry.group, entry.registration.name)
    doc = (getattr(target, "__doc__", None) or "").strip() if entry.group is not Group.RECIPE else ""
    return {**summary, "doc": doc, "options": _options(target), "ports": _ports(target)}


def _options(target: Any) -> list[dict[str, Any]]:
    from posttrain.registry.options import describe

    model = getattr(target, "config", None)
    return describe(model) if model is not None else []


def _ports(target: Any) -> list[dict[str, Any]]:
    return [
        {
            "name": port.name,
            "kinds": sorted(port.kinds),
            "formats": sorted(port.formats),
            "optional": port.optional,
            "many": port.many,
        }
        for port in getattr(target, "inputs", ())
    ]


def _print(*tables: Table) -> None:
    for table in tables:
        console().print(table)


def _table(
    title: str | None, columns: Sequence[str], rows: Sequence[Sequence[str]], whole: str | None = None
) -> Table:
    """Return a table; the column `whole` is never narrower than what stands in it."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    style = box.SIMPLE_HEAD if whole is None else None
    table = Table(title=title, title_justify="left", title_style="bold", box=style, padding=(0, 2, 0, 0))
    for index, name in enumerate(columns):
        width = max((len(row[index]) for row in rows), default=0) if name == whole else None
        table.add_column(name, overflow="fold", min_width=width)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _overview(entries: Sequence[Entry], catalogue: Catalogue, imported: bool) -> Iterator[Table]:
    """Yield a table for each group: what is not told of any of its entries has no column."""
    for group, members in groupby(entries, key=lambda entry: entry.group):
        rows = sorted(
            (_row(entry, catalogue, imported) for entry in members), key=lambda row: (row[1], row[0])
        )
        told = [index for index in range(len(_COLUMNS)) if any(row[index] for row in rows)]
        columns = [_COLUMNS[index] for index in told]
        yield _table(group.value, columns, [[row[index] for index in told] for row in rows], whole="name")


_COLUMNS = ("name", "family", "summary", "paper", "plugin")


def _row(entry: Entry, catalogue: Catalogue, imported: bool) -> tuple[str, ...]:
    item = entry.registration
    state, family = _imported(entry, catalogue) if imported else (_state(entry, catalogue), None)
    cited = paper(item.reference or "").removeprefix("arXiv ").removeprefix("doi.org/")
    own = entry.plugin.builtin and state == Status.LOADED
    plugin = "" if own else f"{entry.plugin.label} ({state})"
    return item.name, family or "", item.summary, cited, plugin


def paper(reference: str) -> str:
    """Return a reference in few characters: `arXiv 2305.18290` for an address there."""
    return re.sub(
        r"^https?://(www\.)?(arxiv\.org/(abs|pdf)/)?", lambda match: "arXiv " if match[2] else "", reference
    )


def _no_group(name: str) -> PluginError:
    from posttrain.wording import did_you_mean

    groups = [group.value for group in Group]
    expected, fix = f"one of {', '.join(groups)}", did_you_mean(name, groups)
    return PluginError("there is no such group of plugins", found=name, expected=expected, fix=fix)


def _plugin_text(plugin: PluginStatus) -> str:
    lines = [f"plugin {plugin.name} of {plugin.origin}: {plugin.status}"]
    lines += [f"  error: {plugin.error}"] if plugin.error else []
    lines += [f"  {group}: {name}" for group, name in plugin.provides]
    return "\n".join(lines)


def _print_details(detail: dict[str, Any]) -> None:
    say(f"{detail['group']} {detail['name']}: {detail['summary']}")
    origin = f"{detail['distribution'] or detail['plugin']} {detail['version'] or ''}".strip()
    shown = {**detail, "plugin": origin}
    for key in ("plugin", "status", "target", "numerics", "reference", "error"):
        if shown.get(key) is not None:
            say(f"  {key}: {shown[key]}")
    if detail.get("doc"):
        say("\n" + detail["doc"] + "\n")
    if detail.get("ports"):
        rows = [(port["name"], ", ".join(port["kinds"]), _traits(port)) for port in detail["ports"]]
        _print(_table("inputs", ("port", "kinds", "notes"), rows))
    if detail.get("options"):
        options = [(o["name"], o["type"], _default(o), _explanation(o)) for o in detail["options"]]
        _print(_table("options", ("name", "type", "default", "description"), options))


def _traits(port: dict[str, Any]) -> str:
    formats = [f"formats {', '.join(port['formats'])}"] if port["formats"] else []
    return "; ".join(formats + [trait for trait in ("optional", "many") if port[trait]])


def _default(option: dict[str, Any]) -> str:
    return "required" if option["required"] else json.dumps(option["default"], ensure_ascii=False)


def _explanation(option: dict[str, Any]) -> str:
    return "; ".join(filter(None, [option["description"], *option["traits"]]))


app.command()(new)
