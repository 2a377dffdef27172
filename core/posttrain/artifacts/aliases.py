"""The registry of models: numbered versions under a name, and aliases such as `champion` that point at them.

One JSON file for each name, replaced atomically under a lock, so that every change of an alias is a
compare-and-set and leaves a line of history.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from posttrain.artifacts.files import guarded, write_durably
from posttrain.artifacts.locks import acquire
from posttrain.artifacts.store import Store
from posttrain.errors import StoreError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


class _Stored(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class Version(_Stored):
    """One registered version: the artifact, and the run and node that registered it, with its figures."""

    version: int
    digest: str
    run: str
    node: str
    figures: dict[str, float]
    created: str


class AliasChange(_Stored):
    """One change of an alias; `previous` is the version it pointed at before."""

    alias: str
    version: int
    previous: int | None
    time: str
    run: str | None
    node: str | None


class _Register(_Stored):
    schema_version: int = 1
    name: str
    versions: tuple[Version, ...] = ()
    aliases: dict[str, int] = {}
    history: tuple[AliasChange, ...] = ()


class Aliases:
    """Registered names of one workspace. Safe for several processes and threads."""

    def __init__(self, workspace: Path) -> None:
        self.directory = Path(workspace).absolute() / "aliases"
        self._store = Store(workspace)

    def register(self, name: str, digest: str, run: str, node: str, figures: Mapping[str, float]) -> int:
        """Register an artifact under a name and return its version; the same artifact keeps its first one.

        Raises:
            StoreError: When the artifact is not in the store, or the name is malformed.
        """
        self._store.get(digest)
        with self._changing(name) as register:
            for known in register.versions:
                if known.digest == digest:
                    return known.version
            version = 1 + max((known.version for known in register.versions), default=0)
            added = Version(
                version=version, digest=digest, run=run, node=node, figures=dict(figures), created=_now()
            )
            self._write(register.model_copy(update={"versions": (*register.versions, added)}))
            return version

    def set_alias(
        self,
        name: str,
        alias: str,
        version: int,
        expected: int | None,
        *,
        run: str | None = None,
        node: str | None = None,
    ) -> None:
        """Point an alias at a version, if it points where the caller believes.

        Args:
            name: The registered name.
            alias: The alias.
            version: The version it is to point at.
            expected: The version it points at now; None when the alias is not set.
            run: The run that changes it, for the history.
            node: The node that changes it, for the history.

        Raises:
            StoreError: When it points elsewhere (the message names the holder), or there is no such version.
        """
        _check("alias", alias)
        with self._changing(name) as register:
            known = {entry.version: entry for entry in register.versions}
            if version not in known:
                raise StoreError(
                    f"`{name}` has no version {version}",
                    where=str(self._file(name)),
                    expected=f"one of {sorted(known)}" if known else "a registered version",
                    fix="register the artifact first",
                )
            actual = register.aliases.get(alias)
            if actual != expected:
                raise StoreError(
                    f"alias `{alias}` of `{name}` was changed meanwhile",
                    where=str(self._file(name)),
                    found=_holder(known, actual),
                    expected=_holder(known, expected),
                    fix="compare with the actual holder, then set the alias again",
                )
            if actual != version:
                change = AliasChange(
                    alias=alias, version=version, previous=actual, time=_now(), run=run, node=node
                )
                aliases = {**register.aliases, alias: version}
                self._write(
                    register.model_copy(update={"aliases": aliases, "history": (*register.history, change)})
                )

    def current(self, name: str, alias: str) -> Version | None:
        """Return the version an alias points at; None when the name or the alias is not set."""
        _check("alias", alias)
        register = self._read(name)
        wanted = register.aliases.get(alias)
        return next((entry for entry in register.versions if entry.version == wanted), None)

    def aliases(self, name: str) -> dict[str, int]:
        """Return the versions that a name's aliases point at."""
        return dict(sorted(self._read(name).aliases.items()))

    def versions(self, name: str) -> list[Version]:
        """Return the registered versions of a name, oldest first; none for an unknown name."""
        return list(self._read(name).versions)

    def history(self, name: str, alias: str | None = None) -> list[AliasChange]:
        """Return the changes of one alias, or of all, oldest first."""
        return [change for change in self._read(name).history if alias in (None, change.alias)]

    def names(self) -> list[str]:
        """Return the registered names."""
        if not self.directory.is_dir():
            return []
        return sorted(path.stem for path in self.directory.glob("*.json") if _NAME.fullmatch(path.stem))

    def referenced(self) -> set[str]:
        """Return the digests of every registered version, so that each can be pointed at again."""
        return {entry.digest for name in self.names() for entry in self._read(name).versions}

    def _file(self, name: str) -> Path:
        _check("name", name)
        return self.directory / f"{name}.json"

    def _read(self, name: str) -> _Register:
        path = self._file(name)
        try:
            return _Register.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return _Register(name=name)
        except ValidationError as error:
            fix = "restore it; registered versions and aliases exist nowhere else"
            raise StoreError("a registry file is damaged", where=str(path), found=error, fix=fix) from error

    @contextlib.contextmanager
    def _changing(self, name: str) -> Iterator[_Register]:
        """Hold the registry while one name is read and written."""
        path = self._file(name)
        with guarded(path, "change the registry"), acquire(self.directory / ".lock"):
            yield self._read(name)

    def _write(self, register: _Register) -> None:
        write_durably(self._file(register.name), register.model_dump_json(indent=1).encode())


def _check(what: str, value: str) -> None:
    if not _NAME.fullmatch(value):
        raise StoreError(
            f"this is no {what}",
            found=repr(value),
            expected="a letter or digit, then letters, digits, `_`, `.` and `-`",
        )


def _holder(known: Mapping[int, Version], version: int | None) -> str:
    if version is None:
        return "not set"
    holder = known.get(version)
    return f"version {version}" + (f" ({holder.digest[:12]}, run {holder.run})" if holder else "")


def _now() -> str:
    return dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
