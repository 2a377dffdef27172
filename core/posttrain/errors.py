"""The errors a user can meet.

Every message says what is wrong, where, what was found, what was expected and how to mend it.
The command line prints one of them without a traceback and exits with the class's code.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What the `posttrain` command reports to the shell."""

    OK = 0
    FAILED = 1
    INVALID = 2
    REJECTED = 3
    INCONCLUSIVE = 4
    INTERRUPTED = 130


class PosttrainError(Exception):
    """A problem that the person who runs posttrain can act on.

    Args:
        message: What is wrong, in one sentence.
        where: The place: `file:line:column`, a key path, a stage and port.
        found: What was found there.
        expected: What would have been right.
        fix: What to do about it.
    """

    exit_code = ExitCode.FAILED

    def __init__(
        self,
        message: str,
        *,
        where: str | None = None,
        found: object = None,
        expected: str | None = None,
        fix: str | None = None,
    ) -> None:
        self.message = message
        self.where = where
        self.found = None if found is None else str(found)
        self.expected = expected
        self.fix = fix
        super().__init__(str(self))

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.message}" if self.where else self.message]
        for label, value in (("found", self.found), ("expected", self.expected), ("fix", self.fix)):
            if value is not None:
                lines.append(f"  {label}: {value}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, str | None]:
        """Return the parts for `--json` output and for `result.json`."""
        return {
            "type": type(self).__name__,
            "message": self.message,
            "where": self.where,
            "found": self.found,
            "expected": self.expected,
            "fix": self.fix,
        }

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.as_dict()))


def _rebuild(cls: type[PosttrainError], parts: dict[str, str | None]) -> PosttrainError:
    return cls(
        str(parts["message"]),
        where=parts["where"],
        found=parts["found"],
        expected=parts["expected"],
        fix=parts["fix"],
    )


class SpecError(PosttrainError):
    """The pipeline file, an override or a command-line argument is wrong."""

    exit_code = ExitCode.INVALID


class PluginError(PosttrainError):
    """A plugin is missing, broken, incompatible or contradicts another one."""

    exit_code = ExitCode.INVALID


class HandoffError(PosttrainError):
    """What one stage would hand to the next does not fit."""

    exit_code = ExitCode.INVALID


class StoreError(PosttrainError):
    """An artifact is missing, damaged or cannot be written."""


class DataError(PosttrainError):
    """A data file or a row of it cannot be used."""

    exit_code = ExitCode.INVALID


class StageError(PosttrainError):
    """A stage ran and failed."""


class TrainingDiverged(StageError):
    """A loss or gradient stopped being finite."""


class Interrupted(PosttrainError):
    """The run was asked to stop; `posttrain resume` goes on from here."""

    exit_code = ExitCode.INTERRUPTED
