"""Suites: named checks of one plugin as a class of tests that pytest collects."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from posttrain.errors import SpecError
from posttrain.wording import did_you_mean

__tracebackhide__ = True
"""pytest then shows the lines of the plugin, and not those of the kit."""

Subject = TypeVar("Subject")


class Nonconformance(AssertionError):
    """A plugin does not do what its contract says; the message names the plugin and its line."""


@dataclass(frozen=True)
class Check(Generic[Subject]):
    """One thing that must hold.

    Args:
        run: Raises `Nonconformance` when it does not; its docstring says what it is.
        applies: Whether it can be told of this subject at all.
    """

    run: Callable[[Subject], None]
    applies: Callable[[Subject], bool] = lambda subject: True

    def __call__(self, subject: Subject) -> None:
        """Check the subject, if there is something to check."""
        if self.applies(subject):
            self.run(subject)


def suite(
    checks: Mapping[str, Check[Subject]], subject: Callable[[], Subject], except_: Mapping[str, str] | None
) -> type:
    """Return a class with one test for each check.

    Args:
        checks: By name.
        subject: Makes what is checked, when the first test runs.
        except_: Checks that are known not to pass, with the reason; one that passes all the same fails.

    Raises:
        SpecError: An exception names no check, or gives no reason.
    """
    excused = dict(except_ or {})
    for name in excused:
        _require_check(name, checks)
    require_reasons(excused, "except_")
    made = cache(subject)
    members = {f"test_{name}": _test(check, made, excused.get(name)) for name, check in checks.items()}
    return type("Conformance", (), members)


def require_reasons(excused: Mapping[str, str], where: str) -> None:
    """Refuse an exception without a reason.

    Raises:
        SpecError: One has none.
    """
    for name, reason in excused.items():
        if not isinstance(reason, str) or not reason.strip():
            raise SpecError("an exception needs a reason", where=f"{where}[{name!r}]", found=repr(reason))


def _require_check(name: str, checks: Mapping[str, Any]) -> None:
    if name not in checks:
        raise SpecError(
            "there is no such check",
            where="except_",
            found=name,
            expected=f"one of {', '.join(checks)}",
            fix=did_you_mean(name, checks),
        )


def _test(check: Check[Subject], subject: Callable[[], Subject], reason: str | None) -> Callable[[Any], None]:
    def test(self: Any) -> None:
        check(subject())

    test.__doc__ = check.run.__doc__
    if reason is None:
        return test
    import pytest

    marked: Callable[[Any], None] = pytest.mark.xfail(reason=reason, strict=True)(test)
    return marked


def place_of(target: Any) -> str:
    """Return `file:line` of a class or function, as far as it is known."""
    code = inspect.unwrap(target) if callable(target) else target
    try:
        file, (_, line) = inspect.getsourcefile(code), inspect.getsourcelines(code)
    except (OSError, TypeError):
        return getattr(target, "__module__", None) or repr(target)
    return f"{Path(file).name if file else code.__module__}:{line}"
