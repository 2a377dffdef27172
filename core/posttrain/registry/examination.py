"""What a plugin must be like: a stated API, well-spelt and marked hooks, sound registrations."""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pluggy

from posttrain.contracts.registration import Group, Registration
from posttrain.registry import hooks
from posttrain.registry.isolation import Failure, isolated
from posttrain.registry.status import Status, namespace
from posttrain.registry.validation import TARGET
from posttrain.wording import did_you_mean

GROUP_OF = {
    "posttrain_stages": Group.STAGE,
    "posttrain_trainers": Group.TRAINER,
    "posttrain_losses": Group.LOSS,
    "posttrain_backends": Group.BACKEND,
    "posttrain_callbacks": Group.CALLBACK,
    "posttrain_rewards": Group.REWARD,
    "posttrain_formats": Group.FORMAT,
    "posttrain_generators": Group.GENERATOR,
    "posttrain_rules": Group.RULE,
    "posttrain_runners": Group.RUNNER,
    "posttrain_trackers": Group.TRACKER,
    "posttrain_commands": Group.COMMAND,
    "posttrain_recipes": Group.RECIPE,
}
"""The group that each hook registers."""

API = "POSTTRAIN_API"
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*(/[a-z0-9][a-z0-9_.-]*)?")
_CLAUSE = re.compile(r"(>=|<=|==|!=|>|<)\s*(\d+)")
_OPERATORS: dict[str, Callable[[int, int], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_MARK = f"{hooks.PROJECT}_impl"


class Rejection(Exception):
    """A plugin that is not used: the status it gets and what is wrong with it."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass(frozen=True)
class Examined:
    """A sound plugin: the hooks it implements and what they registered."""

    hooks: tuple[str, ...]
    registrations: tuple[tuple[Group, Registration], ...]


def examine(plugin: object, label: str, package: str) -> Examined:
    """Check a plugin object and collect its registrations.

    Raises:
        Rejection: The plugin is incompatible or invalid; none of its registrations counts.
    """
    _check_api(plugin)
    _check_spelling(plugin)
    manager = _register(plugin, label, package)
    callers = {name: getattr(manager.hook, name) for name in GROUP_OF}
    implemented = {name: found for name, caller in callers.items() if (found := caller.get_hookimpls())}
    if not implemented:
        raise Rejection(Status.INVALID, f"implements no hook; expected at least one of {', '.join(GROUP_OF)}")
    found = [
        (GROUP_OF[hook], item)
        for hook, implementations in implemented.items()
        for implementation in implementations
        for item in _called(hook, implementation, label, package)
    ]
    _check_once(found)
    return Examined(tuple(implemented), tuple(found))


def satisfies(version: int, specifier: str) -> bool:
    """Whether an API version satisfies a specifier such as `>=1,<2`; `ValueError` when it is malformed."""
    results = []
    for clause in specifier.split(","):
        match = _CLAUSE.fullmatch(clause.strip())
        if match is None:
            raise ValueError(f"{clause.strip()!r} is not a comparison with a whole number, such as '>=1'")
        results.append(_OPERATORS[match[1]](version, int(match[2])))
    return all(results)


def _check_api(plugin: object) -> None:
    advice = f'state the API it was written for: {API} = ">={hooks.API_VERSION},<{hooks.API_VERSION + 1}"'
    specifier = getattr(plugin, API, None)
    if not isinstance(specifier, str):
        problem = "missing" if specifier is None else "not a string"
        raise Rejection(Status.INVALID, f"{API} is {problem}; {advice}")
    try:
        fits = satisfies(hooks.API_VERSION, specifier)
    except ValueError as error:
        raise Rejection(Status.INVALID, f"{API} = {specifier!r}: {error}; {advice}") from error
    if not fits:
        problem = f"wants posttrain API {specifier}, this is {hooks.API_VERSION}; install another version"
        raise Rejection(Status.INCOMPATIBLE, problem)


def _check_spelling(plugin: object) -> None:
    for name, function in _functions(plugin):
        mark = getattr(function, _MARK, None)
        if name in GROUP_OF and mark is None:
            raise Rejection(Status.INVALID, f"{name} is missing @posttrain.hookimpl{_line_of(function)}")
        if name not in GROUP_OF and not (mark or {}).get("specname"):
            hint = did_you_mean(name, GROUP_OF) or f"the hooks are {', '.join(GROUP_OF)}"
            raise Rejection(Status.INVALID, f"{name} is no hook; {hint}{_line_of(function)}")


def _functions(plugin: object) -> Iterator[tuple[str, Any]]:
    for name in dir(plugin):
        if name.startswith(f"{hooks.PROJECT}_"):
            value = getattr(plugin, name)
            if inspect.isroutine(value):
                yield name, value


def _line_of(function: Any) -> str:
    code = getattr(function, "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno})" if code else ""


def _register(plugin: object, label: str, package: str) -> pluggy.PluginManager:
    # One manager for each plugin: a failed registration is dropped with its manager.
    manager = pluggy.PluginManager(hooks.PROJECT)
    manager.add_hookspecs(hooks)

    def register() -> None:
        manager.register(plugin, name=label)
        manager.check_pending()

    failure = isolated(f"{label}: registering", package, register)
    if isinstance(failure, Failure):
        raise Rejection(Status.INVALID, str(failure))
    return manager


def _called(hook: str, implementation: pluggy.HookImpl, label: str, package: str) -> Sequence[Registration]:
    if implementation.wrapper or implementation.hookwrapper:
        raise Rejection(Status.INVALID, f"{hook} is a hook wrapper; only plain implementations register")
    found = isolated(f"{label}: {hook}", package, implementation.function)
    if isinstance(found, Failure):
        raise Rejection(Status.INVALID, f"{hook} raised {found}")
    place = _line_of(implementation.function)
    if not isinstance(found, list | tuple):
        problem = f"{hook} returned {type(found).__name__}, expected a list of posttrain.Registration{place}"
        raise Rejection(Status.INVALID, problem)
    for item in found:
        wrong = next(_faults(item, GROUP_OF[hook]), None)
        if wrong is not None:
            raise Rejection(Status.INVALID, f"{hook}: {wrong}{place}")
    return found


def _faults(item: object, group: Group) -> Iterator[str]:
    if not isinstance(item, Registration):
        yield f"holds {type(item).__name__} {item!r:.80}, expected posttrain.Registration"
        return
    if not isinstance(item.name, str) or not _NAME.fullmatch(item.name):
        yield f"the name {item.name!r} does not match {_NAME.pattern}"
    if not isinstance(item.summary, str) or not item.summary.strip() or "\n" in item.summary:
        yield f"{item.name!r} needs a summary of one line"
    if isinstance(item.numerics, bool) or not isinstance(item.numerics, int) or item.numerics < 1:
        yield f"{item.name!r}: numerics is {item.numerics!r}, expected a whole number from 1"
    if item.target is None:
        yield f"{item.name!r} has no target"
    if group is not Group.RECIPE and isinstance(item.target, str) and not TARGET.fullmatch(item.target):
        yield f"{item.name!r}: the target {item.target!r} is not of the form 'module:attribute'"


def _check_once(found: Sequence[tuple[Group, Registration]]) -> None:
    seen: set[tuple[Group, str]] = set()
    for group, registration in found:
        claim = (namespace(group), registration.name)
        if claim in seen:
            raise Rejection(Status.INVALID, f"registers the {group} {registration.name!r} twice")
        seen.add(claim)
