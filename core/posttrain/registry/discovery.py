"""Finding plugins: entry points of the group `posttrain`, local files and injected objects.

Each plugin is loaded by itself; whatever is wrong with one is its status and disturbs no other.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from posttrain.contracts.registration import Group, Registration
from posttrain.registry.admission import Admission, normalized
from posttrain.registry.catalogue import Catalogue
from posttrain.registry.examination import Examined, Rejection, examine
from posttrain.registry.isolation import Failure, isolated
from posttrain.registry.local import LocalFile
from posttrain.registry.status import Entry, PluginStatus, Status, namespace

ENTRY_POINTS = "posttrain"
BUILTIN = "posttrain"
"""The distribution whose plugins are built in."""

Registrations = tuple[tuple[Group, Registration], ...]


@dataclass(frozen=True)
class Candidate:
    """A plugin before it is loaded: what is known of it, the names it is listed by, and how to load it."""

    status: PluginStatus
    load: Callable[[], object]
    known_as: tuple[str, ...]


def discover(
    local: Sequence[Path] = (),
    *,
    allow: Collection[str] | None = None,
    deny: Collection[str] = (),
    extra: Sequence[tuple[str, object]] = (),
    installed: bool = True,
) -> Catalogue:
    """Load every plugin that is admitted and return what they register.

    Nothing but the imports themselves is remembered between calls. No plugin's failure raises here.

    Args:
        local: Plugin files, as a pipeline names them.
        allow: Import only these plugins (by entry point, distribution or file name) and the built-in ones.
            Replaces `POSTTRAIN_ALLOW_PLUGINS`.
        deny: Do not import these plugins, in addition to `POSTTRAIN_DISABLE_PLUGINS`.
        extra: Further plugins as (name, module or object); they count as third-party ones.
        installed: Whether to look at entry points.
    """
    candidates = [
        *(_entry_points() if installed else ()),
        *(_local(path) for path in dict.fromkeys(path.resolve() for path in local)),
        *(_extra(name, plugin) for name, plugin in extra),
    ]
    admission = Admission.read(allow, deny, os.environ)
    entries, plugins = _settled(_once([_loaded(candidate, admission) for candidate in candidates]))
    warnings = admission.unmatched(name for candidate in candidates for name in candidate.known_as)
    return Catalogue(entries, plugins, warnings)


def _entry_points() -> list[Candidate]:
    found = [_from_entry_point(point) for point in entry_points(group=ENTRY_POINTS)]
    return sorted(found, key=_precedence)


def _precedence(candidate: Candidate) -> tuple[bool, str, str]:
    status = candidate.status
    return not status.builtin, status.distribution or "", status.name


def _from_entry_point(point: EntryPoint) -> Candidate:
    distribution = str(point.dist.name) if point.dist is not None else None
    module = point.value.partition(":")[0].strip()
    status = PluginStatus(
        name=point.name,
        distribution=distribution,
        version=str(point.dist.version) if point.dist is not None else None,
        builtin=distribution is not None and normalized(distribution) == BUILTIN,
        package=module.partition(".")[0],
    )
    return Candidate(status, point.load, tuple(filter(None, (point.name, distribution))))


def _local(path: Path) -> Candidate:
    known_as = (path.name, path.stem, str(path))
    status = PluginStatus(name=path.name, file=str(path), local=True)
    try:
        file = LocalFile.read(path)
    except OSError as error:
        return Candidate(status, partial(_raise, error), known_as)
    return Candidate(replace(status, digest=file.digest, package=file.module), file.load, known_as)


def _raise(error: Exception) -> NoReturn:
    raise error


def _extra(name: str, plugin: object) -> Candidate:
    status = PluginStatus(name=name, package=_module_of(plugin).partition(".")[0])
    return Candidate(status, lambda: plugin, (name,))


def _loaded(candidate: Candidate, admission: Admission) -> tuple[PluginStatus, Registrations]:
    status = candidate.status
    refusal = admission.refusal(candidate.known_as, builtin=status.builtin)
    if refusal is not None:
        return replace(status, status=Status.BLOCKED, error=refusal), ()
    label = f"plugin {status.name} of {status.label}"
    plugin = isolated(f"{label}: import", status.package, candidate.load)
    if isinstance(plugin, Failure):
        file = status.file or _expected_file(status.package)
        return replace(status, status=Status.IMPORT_ERROR, error=str(plugin), file=file), ()
    module = sys.modules.get(_module_of(plugin))
    status = replace(status, file=status.file or getattr(module, "__file__", None))
    call = partial(_examined, plugin, label, status.package)
    found = isolated(f"{label}: examination", status.package, call)
    if isinstance(found, Failure):
        return replace(status, status=Status.INVALID, error=str(found)), ()
    if isinstance(found, Rejection):
        return replace(status, status=found.status, error=found.message), ()
    return replace(status, hooks=found.hooks), found.registrations


def _examined(plugin: object, label: str, package: str) -> Examined | Rejection:
    try:
        return examine(plugin, label, package)
    except Rejection as rejection:
        return rejection


def _module_of(plugin: object) -> str:
    if isinstance(plugin, ModuleType):
        return plugin.__name__
    return str(getattr(plugin, "__module__", ""))


def _expected_file(package: str) -> str | None:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None  # there is no such module: that is the failure being reported
    return spec.origin if spec is not None else None


def _once(
    loaded: Sequence[tuple[PluginStatus, Registrations]],
) -> list[tuple[PluginStatus, Registrations]]:
    """Keep out what is installed from a file that counts as a local one: one file is one plugin.

    The local one stays, because its key is the same wherever the file is all there is.
    """
    named = {status.file for status, _ in loaded if status.local and status.status is Status.LOADED}
    return [
        (replace(status, status=Status.BLOCKED, error=f"{status.file} is named in `plugins:`"), ())
        if not (status.local or status.builtin) and status.file and str(Path(status.file).resolve()) in named
        else (status, registrations)
        for status, registrations in loaded
    ]


def _settled(
    loaded: Sequence[tuple[PluginStatus, Registrations]],
) -> tuple[list[Entry], list[PluginStatus]]:
    """Drop claims on names that built-in plugins own, and turn the rest into entries."""
    owners: dict[tuple[Group, str], PluginStatus] = {}
    entries: list[Entry] = []
    plugins: list[PluginStatus] = []
    for status, registrations in loaded:  # built-in plugins come first
        taken = [(g, r) for g, r in registrations if (namespace(g), r.name) in owners]
        kept = [each for each in registrations if each not in taken]
        status = replace(status, provides=tuple((group, item.name) for group, item in kept))
        if taken:
            thefts = "; ".join(_theft(group, item, owners) for group, item in taken)
            status = replace(status, status=Status.INVALID, error=thefts)
        if status.builtin:
            owners.update({(namespace(group), item.name): status for group, item in kept})
        plugins.append(status)
        entries.extend(Entry(group, item, status) for group, item in kept)
    return entries, plugins


def _theft(group: Group, item: Registration, owners: dict[tuple[Group, str], PluginStatus]) -> str:
    owner = owners[namespace(group), item.name]
    return (
        f"claims the taken name {item.name!r} ({group}, owned by {owner.distribution}); "
        f"rename it or give it a namespace, such as 'yours/{item.name}'"
    )
