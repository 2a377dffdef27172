"""What is wrong with options, in words: pydantic's errors with the keys of the file as their paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from posttrain.contracts.component import Choice, Config, Uses
from posttrain.contracts.stage import SecretMark
from posttrain.errors import SpecError
from posttrain.keypath import ABSENT, step
from posttrain.registry.fields import Path, Spot, walk
from posttrain.wording import did_you_mean, short


@dataclass(frozen=True)
class ConfigProblem:
    """One thing that is wrong with options.

    Args:
        path: The keys and list indices that lead to it, below `with:`.
        message: What is wrong.
        found: What stands there; never the value of a secret.
        expected: What would be right.
        suggestion: What to do about it.
        at_key: It is about the key, and not about its value.
    """

    path: Path
    message: str
    found: str | None = None
    expected: str | None = None
    suggestion: str | None = None
    at_key: bool = False

    def below(self, path: Path) -> ConfigProblem:
        """Return the problem as one of an outer config that holds this one at `path`."""
        return replace(self, path=(*path, *self.path))

    def __str__(self) -> str:
        parts = [f"{'.'.join(map(str, self.path)) or 'with'}: {self.message}"]
        parts += [f"found {self.found}"] if self.found else []
        parts += [f"expected {self.expected}"] if self.expected else []
        return ", ".join(parts) + (f" ({self.suggestion})" if self.suggestion else "")


class ConfigProblems(SpecError):
    """Options that do not fit; `problems` holds everything that is wrong with them."""

    def __init__(self, problems: Sequence[ConfigProblem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, problems)))

    def __reduce__(self) -> tuple[object, ...]:
        return (ConfigProblems, (self.problems,))


def translated(
    errors: Sequence[ErrorDetails], model: type[BaseModel], data: Mapping[str, Any]
) -> list[ConfigProblem]:
    """Return pydantic's errors about `data` as problems, one for each place."""
    spots = {spot.path: spot for spot in walk(model, data)}
    problems: dict[Path, ConfigProblem] = {}
    misshapen: set[Path] = set()
    for error in errors:
        path = _data_path(error, data)
        problem = _TRANSLATIONS.get(error["type"], _misfit)(error, path, spots)
        known = problems.get(path)
        problems[path] = problem if known is None else _either(known, problem)
        if error["type"].endswith("_type"):
            misshapen.add(path)
    # Where one arm of a union tells what is wrong inside a value, the others cannot take it at all.
    told = {path[:depth] for path in problems for depth in range(len(path))}
    return [problem for path, problem in problems.items() if path not in told & misshapen]


def _data_path(error: ErrorDetails, data: Any) -> Path:
    """Return the location without what pydantic adds to it, such as the names of a union's arms."""
    path: Path = ()
    current = data
    for index, part in enumerate(error["loc"]):
        last = index == len(error["loc"]) - 1
        below = step(current, part)
        if below is not ABSENT:
            current = below
        elif not (last and error["type"] == "missing"):
            continue
        path = (*path, part)
    return path


def _unknown(error: ErrorDetails, path: Path, spots: Mapping[Path, Spot]) -> ConfigProblem:
    outer = spots.get(path[:-1])
    model = None if outer is None else outer.model
    options = [] if model is None else list(model.model_fields)
    known = model.elsewhere.get(str(path[-1])) if model is not None and issubclass(model, Config) else None
    if known is not None:
        return ConfigProblem(path, f"there is no {path[-1]}", suggestion=known, at_key=True)
    return unknown_option(path, options)


def unknown_option(path: Path, options: Sequence[str]) -> ConfigProblem:
    """Return the problem of a key that is no option, with the most similar one."""
    name = str(path[-1])
    return ConfigProblem(
        path,
        f"there is no option {name!r}",
        found=name,
        expected=f"one of {', '.join(options)}" if options else "no options",
        suggestion=did_you_mean(name, options),
        at_key=True,
    )


def _missing(error: ErrorDetails, path: Path, spots: Mapping[Path, Spot]) -> ConfigProblem:
    return ConfigProblem(path, f"the option {str(path[-1])!r} is required", suggestion="set it", at_key=True)


def _misfit(error: ErrorDetails, path: Path, spots: Mapping[Path, Spot]) -> ConfigProblem:
    spot = spots.get(path)
    found = "a literal value" if spot is not None and spot.mark(SecretMark) else short(error["input"])
    expected = _expectation(error, spot)
    fix = _left_out(path, spots) or (f"give one that is {expected}" if error["type"] in _BOUNDS else None)
    return ConfigProblem(path, "the value does not fit", found=found, expected=expected, suggestion=fix)


_BOUNDS = frozenset({"greater_than", "greater_than_equal", "less_than", "less_than_equal"})


def _left_out(path: Path, spots: Mapping[Path, Spot]) -> str | None:
    """Return the fix for a value that does not fit where there is a plain default."""
    holder = spots.get(path[:-1]) if path else None
    field = None if holder is None or holder.model is None else holder.model.model_fields.get(str(path[-1]))
    if field is None or not isinstance(field.default, str | int | float):
        return None
    return f"leave it out for its default, {short(field.default)}, or give one that fits"


def _expectation(error: ErrorDetails, spot: Spot | None) -> str:
    if spot is not None and spot.mark(SecretMark):
        return "env:NAME, the environment variable that holds the secret"
    uses = spot.mark(Uses) if spot is not None and spot.annotation is Choice else None
    if uses is not None:
        return f"the name of a {uses.group}, or a mapping with `name` and its options"
    message = error["msg"]
    for start in ("Input should be ", "Input should ", "List should have "):
        message = message.removeprefix(start)
    return (
        message.replace("an instance of", "")
        .replace("a valid array", "a list")
        .replace("an object", "a mapping")
    )


def _refused(error: ErrorDetails, path: Path, spots: Mapping[Path, Spot]) -> ConfigProblem:
    spot = spots.get(path)
    # A model's own check sees all its options; the whole mapping would only repeat the file.
    whole = not path or (spot is not None and spot.model is not None)
    found = None if whole or (spot is not None and spot.mark(SecretMark)) else short(error["input"])
    reason = error.get("ctx", {}).get("error")
    return ConfigProblem(path, str(reason) if reason is not None else error["msg"], found=found)


_TRANSLATIONS = {
    "extra_forbidden": _unknown,
    "missing": _missing,
    "value_error": _refused,
    "assertion_error": _refused,
}


def _either(known: ConfigProblem, other: ConfigProblem) -> ConfigProblem:
    if known.expected is None or other.expected is None or other.expected in known.expected:
        return known
    return replace(known, expected=f"{known.expected} or {other.expected}")
