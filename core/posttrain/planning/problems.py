"""Problems of a spec: collected, placed, explained, and reported together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from posttrain.errors import PosttrainError, SpecError
from posttrain.planning.secrets import looks_like_secret
from posttrain.planning.source import KeyPath, Places, dotted, problem_at
from posttrain.wording import did_you_mean, listed, short

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails, PydanticCustomError

MAX_SHOWN = 20

_EXPECTED = {
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "list_type": "a list",
    "string_type": "text",
    "int_type": "a whole number",
    "bool_type": "true or false",
}


class SpecProblems(SpecError):
    """Everything that is wrong with a spec, in the order of the file.

    Args:
        problems: The single errors; the first 20 are shown.
    """

    def __init__(self, problems: Iterable[PosttrainError]) -> None:
        self.problems = tuple(problems)
        first = self.problems[0]
        super().__init__(
            first.message, where=first.where, found=first.found, expected=first.expected, fix=first.fix
        )

    def __str__(self) -> str:
        lines = [str(problem) for problem in self.problems[:MAX_SHOWN]]
        hidden = len(self.problems) - MAX_SHOWN
        return "\n".join([*lines, f"… and {hidden} more" if hidden > 0 else ""]).rstrip("\n")

    def as_dict(self) -> dict[str, Any]:
        """Return the parts of the first problem, and all of them under `problems`."""
        return {**super().as_dict(), "problems": [problem.as_dict() for problem in self.problems]}

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (list(self.problems),))


def shown(path: KeyPath, value: Any) -> str:
    """Return a short form of a wrong value, without a secret in it."""
    if isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    if value is None:
        return "nothing"
    key = next((part for part in reversed(path) if isinstance(part, str)), "")
    if looks_like_secret(key, value):
        return "what looks like a secret (not shown)"
    return short(value)


def refusal(problems: Sequence[tuple[KeyPath, SpecError]]) -> PydanticCustomError:
    """Return what a validator raises: problems at paths below the validated field."""
    from pydantic_core import PydanticCustomError

    message = "; ".join(str(problem) for _, problem in problems).replace("{", "{{").replace("}", "}}")
    return PydanticCustomError("spec", message, {"problems": list(problems)})


def from_validation(
    error: ValidationError, places: Places, keys_at: Callable[[KeyPath], Sequence[str]], hints: dict[str, str]
) -> Iterator[SpecError]:
    """Turn pydantic's findings into errors with a place, what was found, what was expected and a fix.

    Args:
        error: What pydantic raised.
        places: Knows where the values are written.
        keys_at: Gives the keys that are known in the mapping at a path.
        hints: The fix for keys that people write in place of a known one.
    """
    for detail in error.errors(include_url=False):
        path = tuple(detail["loc"])
        if detail["type"] == "spec":
            for below, problem in detail["ctx"]["problems"]:
                yield problem_at(
                    places,
                    path + below,
                    problem.message,
                    found=problem.found,
                    expected=problem.expected,
                    fix=problem.fix,
                )
        elif detail["type"] == "extra_forbidden":
            yield _unknown_key(path, places, keys_at(path[:-1]), hints)
        elif detail["type"] == "missing":
            yield problem_at(
                places,
                path[:-1],
                f"`{path[-1]}` is missing",
                expected=f"`{path[-1]}` in {_named(path[:-1])}",
                key=True,
            )
        else:
            yield _wrong_value(detail, path, places)


def _unknown_key(path: KeyPath, places: Places, known: Sequence[str], hints: dict[str, str]) -> SpecError:
    key = str(path[-1])
    return problem_at(
        places,
        path,
        f"unknown key `{key}` in {_named(path[:-1])}",
        found=key,
        expected=listed(known),
        fix=hints.get(key) or did_you_mean(key, known),
        key=True,
    )


def _wrong_value(detail: ErrorDetails, path: KeyPath, places: Places) -> SpecError:
    if path[-1:] == ("[key]",):
        return problem_at(
            places,
            path[:-1],
            f"`{path[-2]}` cannot be a name here",
            found=path[-2],
            expected=f"a name like {detail.get('ctx', {}).get('pattern', 'text')}",
            key=True,
        )
    kind, value = detail["type"], detail["input"]
    fix = None
    if kind == "string_type" and isinstance(value, int | float):
        fix = f'quote it: "{shown(path, value)}"'
    pattern = detail.get("ctx", {}).get("pattern")
    expected = _EXPECTED.get(kind) or (f"text like {pattern}" if pattern else detail["msg"])
    return problem_at(
        places,
        path,
        f"{_named(path)} has a wrong value",
        found=shown(path, value),
        expected=expected,
        fix=fix,
    )


def _named(path: KeyPath) -> str:
    return f"`{dotted(path)}`" if path else "the pipeline"
