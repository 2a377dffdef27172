"""The verbs around a pipeline file: `init`, `recipes`, `schema`, `doctor`."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from posttrain.cli.output import DEFAULT_WORKSPACE, Json, Workspace, console, print_json, printable, say
from posttrain.errors import ExitCode, SpecError


def recipes(as_json: Json = False) -> None:
    """List the shipped pipeline files."""
    from posttrain.contracts.registration import Group
    from posttrain.registry.discovery import discover

    catalogue = discover()
    rows = [
        (
            name,
            catalogue.entry(Group.RECIPE, name).registration.summary,
            str(catalogue.load(Group.RECIPE, name)),
        )
        for name in catalogue.names(Group.RECIPE)
    ]
    if as_json:
        print_json([{"name": name, "summary": summary, "file": file} for name, summary, file in rows])
        return
    for name, summary, _ in rows:
        say(f"{name:<16} {summary}")
    say("\n`posttrain run NAME` runs one; `posttrain init NAME` copies it here to change it")


def init(
    recipe: Annotated[str, typer.Argument(help="The recipe to start from.")] = "quickstart",
    to: Annotated[
        Path | None, typer.Option("--to", help="Where to write it; RECIPE.yaml here by default.")
    ] = None,
    schema: Annotated[bool, typer.Option(help="Write the JSON Schema beside it, for editors.")] = True,
) -> None:
    """Copy a recipe into this directory, to be changed."""
    from posttrain.contracts.registration import Group
    from posttrain.registry.discovery import discover

    catalogue = discover()
    source = Path(catalogue.load(Group.RECIPE, recipe))
    target = to or Path(f"{recipe}.yaml")
    if target.exists():
        raise SpecError(
            "this file exists already", where=str(target), fix="name another one with --to, or remove it"
        )
    text = source.read_text(encoding="utf-8")
    if schema:
        import json

        from posttrain.planning.schema import pipeline_schema

        schema_file = target.with_name("posttrain.schema.json")
        schema_file.write_text(json.dumps(pipeline_schema(catalogue), indent=1), encoding="utf-8")
        text = f"# yaml-language-server: $schema={schema_file.name}\n{text}"
    target.write_text(text, encoding="utf-8")
    say(f"wrote {target}; `posttrain plan {target}` shows what it would do")


def schema(
    pipeline: Annotated[
        str | None, typer.Argument(metavar="PIPELINE", help="Include this pipeline's local plugins.")
    ] = None,
) -> None:
    """Print the JSON Schema of pipeline files, options of all plugins included."""
    from posttrain.planning.schema import pipeline_schema
    from posttrain.registry.discovery import discover

    if pipeline is None:
        print_json(pipeline_schema(discover()))
    else:
        from posttrain.pipeline import Pipeline

        print_json(pipeline_schema(Pipeline.find(pipeline).catalogue))


def doctor(workspace: Workspace = DEFAULT_WORKSPACE, as_json: Json = False) -> None:
    """Check this installation: Python, packages, plugins, workspace, disk."""
    checks = [
        _python(),
        *_packages(),
        *_plugins(),
        _writable(workspace.absolute()),
        _disk(workspace.absolute()),
    ]
    if as_json:
        print_json([{"check": name, "ok": ok, "found": found, "fix": fix} for name, ok, found, fix in checks])
    else:
        from rich.text import Text

        for name, ok, found, fix in checks:
            line = Text("ok    " if ok else "fault ", style="green" if ok else "red")
            told = f"{name:<14} {found}" + (f"  fix: {fix}" if fix and not ok else "")
            line.append(printable(told), style="default")
            console().print(line, soft_wrap=True)
    if not all(ok for _, ok, _, _ in checks):
        raise typer.Exit(int(ExitCode.FAILED))


Check = tuple[str, bool, str, str | None]


def _python() -> Check:
    version = sys.version_info
    found = f"{version.major}.{version.minor}.{version.micro} at {sys.executable}"
    return "python", version >= (3, 11), found, "install Python 3.11 or newer"


def _packages() -> list[Check]:
    from importlib import metadata

    from posttrain.registry.extras import installing_extra

    extras = {
        "torch": "train",
        "transformers": "train",
        "peft": "train",
        "prefect": "flows",
        "mlflow": "flows",
    }
    found: list[Check] = []
    for name, extra in extras.items():
        try:
            found.append((name, True, metadata.version(name), None))
        except metadata.PackageNotFoundError:
            found.append((name, False, "not installed", installing_extra(extra)))
    return found


def _plugins() -> list[Check]:
    from posttrain.registry.discovery import discover

    catalogue = discover()
    found: list[Check] = [
        (
            f"plugin {plugin.name}",
            plugin.trouble is None,
            plugin.trouble or plugin.origin,
            "posttrain plugins check",
        )
        for plugin in catalogue.plugins
    ]
    return found


def _existing(path: Path) -> Path:
    """Return the path, or the nearest directory above it that is there."""
    return next(place for place in (path, *path.parents) if place.exists())


def _writable(workspace: Path) -> Check:
    place = _existing(workspace)
    usable = place.is_dir() and os.access(place, os.W_OK | os.X_OK)
    return "workspace", usable, str(workspace), f"make {place} a directory that this user can write"


def _disk(workspace: Path) -> Check:
    directory = _existing(workspace)
    free = shutil.disk_usage(directory).free
    return "disk", free > 2**30, f"{free / 2**30:.1f} GiB free", "free at least 1 GiB"


def completion(
    shell: Annotated[str, typer.Argument(help="bash, zsh, fish, or pwsh.")] = "bash",
) -> None:
    """Print the shell completion script; for bash: `eval "$(posttrain completion bash)"`."""
    from typer.completion import get_completion_script  # type: ignore[attr-defined]  # imported, not declared

    known = ("bash", "zsh", "fish", "pwsh")
    if shell not in known:
        raise SpecError(
            "there is no completion for this shell", where="SHELL", found=shell, expected=", ".join(known)
        )
    say(get_completion_script(prog_name="posttrain", complete_var="_POSTTRAIN_COMPLETE", shell=shell))
