"""The typed look-up of plugins: names to registrations to validated plugin objects."""

from __future__ import annotations

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.contracts.registration import Group
from posttrain.contracts.stage import Stage
from posttrain.errors import PluginError
from posttrain.registry.editable import project_of, source_digest, top_level
from posttrain.registry.isolation import Failure, isolated
from posttrain.registry.status import Entry, PluginStatus, Status
from posttrain.registry.validation import faults
from posttrain.wording import did_you_mean

__all__ = ["Catalogue", "Conflict", "Entry", "PluginStatus", "Status"]

_FOUND_IN: Mapping[Group, tuple[Group, ...]] = {
    **{group: (group,) for group in Group},
    Group.STAGE: (Group.STAGE, Group.TRAINER),
}
"""Where a name of a group is looked for: a trainer is a stage."""


@dataclass(frozen=True)
class Conflict:
    """A name that several third-party plugins claim; it cannot be used."""

    group: Group
    name: str
    entries: tuple[Entry, ...]

    def error(self) -> PluginError:
        """Return the error for the one who needs the name."""
        plugins = [entry.plugin for entry in self.entries]
        files = [plugin.file for plugin in plugins if plugin.local]
        installed = [plugin for plugin in plugins if not plugin.local]
        ways = [f"take {files[0]} out of `plugins:`"] if files else []
        ways += (
            [f"keep the installed one out (POSTTRAIN_DISABLE_PLUGINS={installed[0].name})"]
            if installed
            else []
        )
        owner = next((plugin.distribution for plugin in installed if plugin.distribution), "yours")
        return PluginError(
            f"the {self.group} {self.name!r} is claimed by {len(plugins)} plugins",
            found=" and ".join(plugin.place for plugin in plugins),
            expected="one plugin to claim the name",
            fix=f"{', or '.join(ways)}, or give one of the names a namespace ('{owner}/{self.name}')",
        )


class Catalogue:
    """All plugins and what they register.

    Args:
        entries: Every registration that counts.
        plugins: Every plugin, whatever its status.
        warnings: What is odd about the allow and deny lists.
    """

    def __init__(
        self, entries: Sequence[Entry], plugins: Sequence[PluginStatus], warnings: Sequence[str] = ()
    ) -> None:
        self.plugins = list(plugins)
        self.warnings = list(warnings)
        self._claims: dict[Group, dict[str, list[Entry]]] = {group: defaultdict(list) for group in Group}
        for entry in entries:
            for group in _groups_with(entry.group):
                self._claims[group][entry.registration.name].append(entry)
        self._loaded: dict[int, Any] = {}
        self._stages: dict[str, Stage] = {}
        self._sources: dict[str, str | None] = {}

    def names(self, group: Group) -> list[str]:
        """Return the usable names registered under exactly this group; names in conflict are left out."""
        return sorted(
            name
            for name, claims in self._claims[group].items()
            if len(claims) == 1 and claims[0].group is group
        )

    def stages(self) -> list[str]:
        """Return everything that `uses:` may name: stages and trainers."""
        return sorted(name for name, claims in self._claims[Group.STAGE].items() if len(claims) == 1)

    def entries(self) -> list[Entry]:
        """Return every registration, those in conflict included, by group and name."""
        order = {group: index for index, group in enumerate(Group)}
        claimed = [(group, claims) for group in Group for claims in self._claims[group].values()]
        found = [entry for group, claims in claimed for entry in claims if entry.group is group]

        return sorted(found, key=lambda each: (order[each.group], each.registration.name, each.plugin.label))

    def conflicts(self) -> list[Conflict]:
        """Return the names that cannot be used because several third-party plugins claim them."""
        return [
            Conflict(group, name, tuple(claims))
            for group in Group
            for name, claims in sorted(self._claims[group].items())
            if len(claims) > 1 and any(entry.group is group for entry in claims)
        ]

    def troubles(self, *, denied: bool = False) -> list[str]:
        """Return one line for each plugin that does not count fully and for each name in conflict.

        Rules and trackers are used without being named, so whoever plans or runs shows these lines.

        Args:
            denied: Tell of installed plugins that the allow and deny lists keep out, too: what is missing may
                be theirs. A local file that is kept out is always told, because a pipeline asks for it.
        """
        told = [plugin for plugin in self.plugins if denied or plugin.local or not plugin.denied]
        broken = [line for plugin in told if (line := plugin.trouble) is not None]
        errors = [conflict.error() for conflict in self.conflicts()]
        return broken + [f"{error.message}: {error.found}" for error in errors]

    def aliases(self, group: Group, name: str) -> list[str]:
        """Return the spellings of a name: itself and, when unique, the part after its namespace."""
        short = name.rpartition("/")[2]
        if short == name or short in self._claims[group] or len(self._qualified(group, short)) > 1:
            return [name]
        return [name, short]

    def entry(self, group: Group, name: str) -> Entry:
        """Look a name up; under `Group.STAGE` trainers are found too.

        Raises:
            PluginError: The name is unknown, ambiguous, or claimed by several plugins.
        """
        claims = self._claims[group].get(name)
        if claims is None:
            claims = self._unqualified(group, name)
        if len(claims) > 1:
            raise Conflict(group, name, tuple(claims)).error()
        return claims[0]

    def load(self, group: Group, name: str) -> Any:
        """Import what a name stands for and check it against the group's contract; the result is remembered.

        Raises:
            PluginError: As `entry`; or the import failed, or the object breaks the contract.
        """
        entry = self.entry(group, name)
        if id(entry) not in self._loaded:
            self._loaded[id(entry)] = _imported(entry)
        return self._loaded[id(entry)]

    def make(self, group: Group, name: str) -> Any:
        """Return a new instance of a class that is registered, or the very object that is.

        Raises:
            PluginError: As `load`; or the constructor failed.
        """
        target = self.load(group, name)
        if not isinstance(target, type):
            return target
        entry = self.entry(group, name)
        made = isolated(f"{group} {name}: constructor", _package(entry), target)
        if isinstance(made, Failure):
            raise _broken(entry, f"cannot be made: {made.error}", where=made.where)
        return made

    def stage(self, name: str) -> Stage:
        """Return the stage or trainer of this name, one instance for each catalogue."""
        canonical = self.entry(Group.STAGE, name).registration.name
        if canonical not in self._stages:
            self._stages[canonical] = self.make(Group.STAGE, canonical)
        return self._stages[canonical]

    def identity(self, group: Group, name: str) -> dict[str, Any]:
        """Return what identifies an implementation in keys.

        A built-in plugin is known by its numerics version, one of another distribution also by the version
        of that distribution, and by the digest of its source where that is installed editably; a local file by
        its digest.
        """
        entry = self.entry(group, name)
        item, plugin = entry.registration, entry.plugin
        if plugin.digest is not None:
            return {"name": item.name, "file": plugin.digest}
        own = {"name": item.name, "numerics": item.numerics}
        if plugin.builtin or plugin.distribution is None:
            return own
        whose = {**own, "distribution": plugin.distribution, "version": plugin.version}
        source = self._source(plugin.distribution)
        return whose if source is None else {**whose, "source": source}

    def _source(self, distribution: str) -> str | None:
        """Return the digest of what a distribution's plugins are made of, where it is installed editably."""
        if distribution not in self._sources:
            project = project_of(distribution)
            entries = [entry for entry in self.entries() if entry.plugin.distribution == distribution]
            packages = {name for entry in entries for name in (entry.plugin.package, _package(entry)) if name}
            self._sources[distribution] = (
                None if project is None else source_digest(project, packages, top_level(distribution))
            )
        return self._sources[distribution]

    def shared(self, name: str) -> dict[str, int]:
        """Return the numerics versions of the code that a stage shares with others.

        A stage of another plugin that runs a built-in target shares what the built-in stages on it say, whether
        it inherits from them or only names the target. Only stages of the package that holds the target are
        imported: every worker of another plugin asks.
        """
        stage = self.stage(name)
        if self.entry(Group.STAGE, name).plugin.builtin:
            return dict(stage.shared)
        entries = [self.entry(Group.STAGE, each) for each in self.stages()]
        near = [each for each in entries if each.plugin.builtin and _package(each) == _root(stage.target)]
        stages = [self.stage(each.registration.name) for each in near]
        same = [other for other in stages if other.target == stage.target]
        return {**stage.shared, **{code: version for other in same for code, version in other.shared.items()}}

    def _qualified(self, group: Group, short: str) -> list[str]:
        return sorted(name for name in self._claims[group] if name.endswith(f"/{short}"))

    def _unqualified(self, group: Group, name: str) -> list[Entry]:
        matches = self._qualified(group, name)
        if len(matches) == 1:
            return self._claims[group][matches[0]]
        if matches:
            raise PluginError(
                f"the {group} {name!r} is ambiguous", found=", ".join(matches), fix="write the whole name"
            )
        raise self._unknown(group, name)

    def _unknown(self, group: Group, name: str) -> PluginError:
        known = [alias for each in self._claims[group] for alias in self.aliases(group, each)]
        elsewhere = [entry.group for entry in self.entries() if entry.registration.name == name]
        advice = [did_you_mean(name, known)]
        advice += [f"{name!r} is a {other}, not a {group}" for other in elsewhere]
        advice += [line for plugin in self.plugins if (line := plugin.trouble) is not None]
        fix = "; ".join(filter(None, advice))
        return PluginError(
            f"there is no {group} {name!r}",
            found=name,
            expected=f"one of {', '.join(sorted(self._claims[group]))}" if self._claims[group] else None,
            fix=fix or f"`posttrain plugins list` shows every {group}",
        )


def _groups_with(group: Group) -> list[Group]:
    return [wanted for wanted, groups in _FOUND_IN.items() if group in groups]


def _imported(entry: Entry) -> Any:
    load = partial(_recipe, entry) if entry.group is Group.RECIPE else entry.registration.load
    label = f"{entry.group} {entry.registration.name} of {entry.plugin.label}"
    target = isolated(label, _package(entry), load)
    if isinstance(target, Failure):
        raise _broken(entry, f"cannot be imported: {target.error}", where=target.where)
    wrong = isolated(label, _package(entry), lambda: list(faults(entry.group, target)))
    if isinstance(wrong, Failure):
        raise _broken(entry, f"cannot be examined: {wrong.error}", where=wrong.where)
    if wrong:
        problem = f"breaks the contract of a {entry.group}: {'; '.join(wrong)}"
        raise _broken(entry, problem, where=_place(target))
    return target


def _recipe(entry: Entry) -> Path:
    base = Path(entry.plugin.file).parent if entry.plugin.file else Path()
    return base / str(entry.registration.target)


def _package(entry: Entry) -> str:
    target = entry.registration.target
    if entry.group is not Group.RECIPE and isinstance(target, str):
        return _root(target)
    return entry.plugin.package


def _root(target: str) -> str:
    return target.partition(":")[0].partition(".")[0]


def _place(target: Any) -> str | None:
    if isinstance(target, type) or inspect.isroutine(target):
        with contextlib.suppress(OSError, TypeError):  # what was made by a call has no source
            return f"{inspect.getsourcefile(target)}:{inspect.getsourcelines(target)[1]}"
    return getattr(target, "__module__", None)


def _broken(entry: Entry, problem: str, where: str | None) -> PluginError:
    return PluginError(
        f"the {entry.group} {entry.registration.name!r} of {entry.plugin.label} {problem}",
        where=where or entry.plugin.file,
        found=entry.registration.target,
        fix=f"mend or deny the plugin {entry.plugin.name!r}; `posttrain plugins check` shows all problems",
    )
