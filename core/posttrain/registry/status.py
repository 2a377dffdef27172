"""What discovery says of each plugin, and of each thing a plugin registers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from posttrain.contracts.registration import Group, Registration


class Status(StrEnum):
    """How a plugin stands.

    A `loaded` plugin counts fully. The others count for nothing, but for an `invalid` one whose only fault is
    that it claims names of built-in plugins: then those claims alone are dropped.
    """

    LOADED = "loaded"
    BLOCKED = "blocked"
    INCOMPATIBLE = "incompatible"
    IMPORT_ERROR = "import-error"
    INVALID = "invalid"


@dataclass(frozen=True)
class PluginStatus:
    """One plugin: an entry point, a local file or an injected object.

    Args:
        name: The name of the entry point, or of the file.
        status: How it stands.
        distribution: The distribution that brings it; None for local files.
        version: The distribution's version.
        file: Where its code is.
        digest: The sha256 of a local file.
        local: It is a file that a pipeline names.
        builtin: It belongs to the distribution `posttrain` itself.
        package: The top-level module its code lives in.
        hooks: The hooks it implements.
        error: What is wrong, in one line.
        provides: What it registers, as (group, name).
    """

    name: str
    status: Status = Status.LOADED
    distribution: str | None = None
    version: str | None = None
    file: str | None = None
    digest: str | None = None
    local: bool = False
    builtin: bool = False
    package: str = ""
    hooks: tuple[str, ...] = ()
    error: str | None = None
    provides: tuple[tuple[Group, str], ...] = ()

    @property
    def label(self) -> str:
        """What people call it: `acme-losses 1.0`, or the name of the local file."""
        return self.name if self.distribution is None else f"{self.distribution} {self.version or ''}".strip()

    @property
    def origin(self) -> str:
        """The label with the file it comes from."""
        return f"{self.label} ({self.file})" if self.file else self.label

    @property
    def place(self) -> str:
        """The origin, with how it came in."""
        return f"{self.origin}, {'named in `plugins:`' if self.local else 'installed'}"

    @property
    def denied(self) -> bool:
        """Whether it is kept out: by the allow and deny lists, or by a local plugin of the very same file."""
        return self.status is Status.BLOCKED

    @property
    def trouble(self) -> str | None:
        """One line on a plugin that does not count, or not fully."""
        if self.status is Status.LOADED:
            return None
        return f"plugin {self.name!r} of {self.label} is {self.status}: {self.error}"

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "name": self.name,
            "status": self.status.value,
            "distribution": self.distribution,
            "version": self.version,
            "file": self.file,
            "digest": self.digest,
            "builtin": self.builtin,
            "hooks": list(self.hooks),
            "error": self.error,
            "provides": [{"group": group.value, "name": name} for group, name in self.provides],
        }


@dataclass(frozen=True)
class Entry:
    """One registration and the plugin it comes from."""

    group: Group
    registration: Registration
    plugin: PluginStatus


def namespace(group: Group) -> Group:
    """Return the group whose names `group` shares: trainers are stages, so their names are one set."""
    return Group.STAGE if group is Group.TRAINER else group
