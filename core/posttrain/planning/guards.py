"""The plugin files that a pipeline names: each has to be usable, because it may hold a hand-off rule."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from posttrain.planning.problems import SpecProblems
from posttrain.planning.source import Places, problem_at
from posttrain.registry.catalogue import Catalogue

_FIX = "correct the path, or mend the file: `posttrain plugins check --file` says more"


def require_usable(catalogue: Catalogue, files: Sequence[Path], places: Places) -> None:
    """Refuse a pipeline whose own plugin files do not load; one that was denied on purpose is a warning.

    Args:
        catalogue: What was found, those files included.
        files: The files, as `plugins` lists them.
        places: Knows where they are written.

    Raises:
        SpecProblems: Everything that is wrong with them.
    """
    by_file = {plugin.file: plugin for plugin in catalogue.plugins if plugin.local}
    problems = []
    for index, path in enumerate(files):
        plugin = by_file[str(path.resolve())]
        if plugin.trouble is not None and not plugin.denied:
            message = f"this plugin file cannot be used: {plugin.status}: {plugin.error}"
            problems.append(problem_at(places, ("plugins", index), message, found=path, fix=_FIX))
    if problems:
        raise SpecProblems(problems)
