"""Plans and graphs of small pipelines, from YAML text or from Python, made of `helpers.planning_stages`."""

from __future__ import annotations

import io
import sys
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from helpers import planning_stages as stages

from posttrain.cli.app import run
from posttrain.cli.output import console
from posttrain.planning.graph import Graph, build_graph
from posttrain.planning.overrides import override
from posttrain.planning.parsing import parse, resolved
from posttrain.planning.problems import SpecProblems
from posttrain.planning.source import Source, read
from posttrain.planning.tiny import shrunk
from posttrain.registry.catalogue import Catalogue
from posttrain.registry.discovery import discover

PLUGIN = Path(stages.__file__)

CHAIN = """
    stages:
      chats: {uses: try/rows}
      sft: {uses: try/train, inputs: {data: chats.train}}
      dpo: {uses: try/train, inputs: {data: chats.train, model: sft}, with: {loss: {name: margin, beta: 0.1}}}
      eval: {uses: try/compare, inputs: {models: [sft, dpo]}}
"""


@lru_cache(maxsize=1)
def catalogue() -> Catalogue:
    """The test stages and losses, and nothing else."""
    found = discover([PLUGIN], installed=False)
    assert found.troubles() == []
    return found


def graph(
    pipeline: str | Mapping[str, Any],
    *sets: str,
    base: Path = Path("/base"),
    tiny: bool = False,
    plugins: Catalogue | None = None,
) -> Graph:
    """Build the graph of YAML text (called `file`), or of stages as Python data."""
    plugins = plugins or catalogue()
    if isinstance(pipeline, str):
        source = override(read(textwrap.dedent(pipeline), "file"), sets)
    else:
        source = Source("pipeline", {"stages": dict(pipeline)})
    spec = resolved(parse(source), source)
    return build_graph(shrunk(spec, plugins, base) if tiny else spec, plugins, base)


def problems(pipeline: str | Mapping[str, Any], *sets: str, **options: Any) -> list[str]:
    """Return what is wrong with a pipeline, each problem as people see it."""
    with pytest.raises(SpecProblems) as caught:
        graph(pipeline, *sets, **options)
    return [str(problem) for problem in caught.value.problems]


@dataclass(frozen=True)
class Told:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def complaints(self) -> str:
        """Standard error without the reminder of what a test denies."""
        lines = self.err.splitlines(keepends=True)
        return "".join(line for line in lines if "denied by POSTTRAIN_DISABLE_PLUGINS" not in line)


def alone(
    directory: Path, monkeypatch: pytest.MonkeyPatch, *, columns: int = 100, flows: bool = False
) -> None:
    """Give the command line a working directory and a width, and nothing of the caller's settings.

    Args:
        directory: The working directory.
        monkeypatch: Takes it back.
        columns: The terminal's width.
        flows: Whether runs go through Prefect.
    """
    monkeypatch.chdir(directory)
    monkeypatch.setenv("COLUMNS", str(columns))
    if not flows:
        monkeypatch.setenv("POSTTRAIN_DISABLE_PLUGINS", "flows")
    for name in ("POSTTRAIN_WORKSPACE", "POSTTRAIN_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)


def command(*arguments: str | Path) -> Told:
    """Run `posttrain ARGUMENTS` in this process."""
    console.cache_clear()  # it keeps the width it was made with
    out, err = io.StringIO(), io.StringIO()
    with (
        patch.object(sys, "argv", ["posttrain", *map(str, arguments)]),
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        run()
        sys.exit(0)
    code = ended.value.code
    return Told(code if isinstance(code, int) else 0 if code is None else 1, out.getvalue(), err.getvalue())


def write_pipeline(path: Path, text: str, plugins: Sequence[Path] = (PLUGIN,)) -> Path:
    """Write a pipeline file that uses local plugin files."""
    listed = "".join(f"  - {plugin}\n" for plugin in plugins)
    path.write_text(f"plugins:\n{listed}{textwrap.dedent(text).lstrip()}", encoding="utf-8")
    return path
