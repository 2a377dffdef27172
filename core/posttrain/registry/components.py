"""Options and the components they name: validation, marks and what goes into keys.

Validation is strict about types: `"3"` is no integer and `true` is no number. But a whole number is a float,
a list is a tuple, a string is a path or the value of an enum, as they have to be in YAML and JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError, to_json

from posttrain.artifacts.manifest import canonical
from posttrain.contracts.component import Choice, Component, Config, Uses
from posttrain.contracts.registration import Group
from posttrain.contracts.stage import SecretMark, SourceMark, VolatileMark
from posttrain.errors import PluginError
from posttrain.keypath import at
from posttrain.registry.catalogue import Catalogue
from posttrain.registry.fields import BoundChoice, Path, Spot, unset, walk
from posttrain.registry.fitting import fits, fitting, takers, traits
from posttrain.registry.problems import ConfigProblem, ConfigProblems, translated
from posttrain.registry.schema import config_schema
from posttrain.registry.validation import config_of
from posttrain.wording import did_you_mean, listed

__all__ = [
    "ConfigProblem",
    "ConfigProblems",
    "choices",
    "config_schema",
    "keyed",
    "marked",
    "resolve",
    "semantic",
    "validate_config",
]

ConfigT = TypeVar("ConfigT", bound=Config)
_NOT_IN_KEYS = (SourceMark, SecretMark, VolatileMark)


def validate_config(model: type[ConfigT], data: Mapping[str, Any], catalogue: Catalogue) -> ConfigT:
    """Make a config, the options of all components it names validated and complete.

    Args:
        model: The option model.
        data: The options: plain data, or objects with a JSON form (paths, enums, choices).
        catalogue: Where components are looked up.

    Raises:
        ConfigProblems: Everything that is wrong, each problem with its path.
    """
    data = _named(model, data)
    try:
        config = model.model_validate_json(to_json(data), strict=True)
    except PydanticSerializationError as error:
        raise ConfigProblems([ConfigProblem((), f"an option has no JSON form: {error}")]) from error
    except ValidationError as error:
        problems = [
            _pointed(problem, model, catalogue)
            for problem in translated(error.errors(include_url=False), model, data)
        ]
        raise ConfigProblems(problems + _bind_all(model, data, data, catalogue)[1]) from error
    bound, problems = _bind_all(model, config, data, catalogue)
    if problems:
        raise ConfigProblems(problems)
    complete: ConfigT = _replaced(config, bound, ())
    return complete


def _pointed(problem: ConfigProblem, model: type[Config], catalogue: Catalogue) -> ConfigProblem:
    """Point an unknown option that belongs to a default component there: `beta` to `loss: {name: sigmoid, beta: …}`."""
    if problem.suggestion is not None or not problem.at_key or len(problem.path) != 1:
        return problem
    option = str(problem.path[0])
    for name, field in model.model_fields.items():
        uses = next((mark for mark in field.metadata if isinstance(mark, Uses)), None)
        if uses is None or not isinstance(field.default, Choice):
            continue
        if option in config_of(catalogue.load(uses.group, field.default.name)).model_fields:
            example = f"{name}: {{name: {field.default.name}, {option}: …}}"
            return replace(problem, suggestion=f"it is an option of `{name}`: write `{example}`")
    return replace(problem, suggestion="take one of those expected, or leave it out")


def _named(model: type[Config], data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Complete choices that give options only (`loss: {beta: 0.2}`): they mean the field's default component."""
    named = dict(data)
    for name, field in model.model_fields.items():
        given, default = named.get(name), field.default
        if isinstance(default, Choice) and isinstance(given, Mapping) and "name" not in given:
            named[name] = {"name": default.name, **given}
    return named


def choices(config: Config, volatile: bool = True) -> Iterator[tuple[Path, Choice, Group]]:
    """Yield every component choice of a config, those inside the options of components too.

    Args:
        config: The config.
        volatile: Also those that cannot change results, and what their options name.
    """
    place = _everywhere if volatile else keyed(config)
    for spot in walk(type(config), config):
        uses = spot.mark(Uses)
        if uses is not None and isinstance(spot.value, Choice) and place(spot.path) is not None:
            yield spot.path, spot.value, uses.group


def keyed(config: Config) -> Callable[[Path], Path | None]:
    """Return what says where an option stands in the key: None for one that cannot change results.

    What a component that only watches is told belongs in no key either, and in a list the others move up.
    """
    left_out = {spot.path for spot in walk(type(config), config) if _volatile(spot)}

    def place(path: Path) -> Path | None:
        if any(path[:depth] in left_out for depth in range(len(path) + 1)):
            return None
        return tuple(_moved_up(path[:depth], part) for depth, part in enumerate(path))

    def _moved_up(holder: Path, part: str | int) -> str | int:
        if not isinstance(part, int):
            return part
        return part - sum((*holder, index) in left_out for index in range(part))

    return place


def _everywhere(path: Path) -> Path | None:
    return path


def _volatile(spot: Spot) -> bool:
    """Whether what stands there cannot change results: its field says so, or the component that is named."""
    watching = isinstance(spot.value, BoundChoice) and spot.value.watches_only
    return watching or spot.mark(VolatileMark) is not None


def marked(config: Config, mark: type[Any]) -> Iterator[tuple[Path, Any]]:
    """Yield every value with a mark such as `SourceMark`; of a marked list or mapping, its items."""
    for spot in walk(type(config), config):
        if spot.mark(mark) is not None and not isinstance(spot.value, list | tuple | Mapping):
            yield spot.path, spot.value


def semantic(config: Config) -> dict[str, Any]:
    """Return the options that belong in a key: the JSON form without volatile, secret and source fields.

    Raises:
        ValueError: The config does not come from `validate_config`, so what its components mark is not known.
    """
    unbound = [path for path, choice, _ in choices(config) if not isinstance(choice, BoundChoice)]
    if unbound:
        raise ValueError(f"the choices at {unbound} were not validated against a catalogue")
    spots = list(walk(type(config), config))
    marks = [*((spot.path, spot.marks) for spot in spots), *unset(type(config), config)]
    left_out = frozenset(
        path for path, found in marks if any(isinstance(mark, _NOT_IN_KEYS) for mark in found)
    ) | {spot.path for spot in spots if _volatile(spot)}
    unordered = frozenset(spot.path for spot in spots if isinstance(spot.value, set | frozenset))
    return dict(_without(_ordered(config.model_dump(mode="json"), unordered, ()), left_out, ()))


def resolve(choice: Choice, group: Group, catalogue: Catalogue) -> Component:
    """Load the component a choice names and make its config.

    Raises:
        PluginError: It cannot be found, imported or made.
        ConfigProblems: Its options do not fit.
    """
    bound = _bind(choice, Uses(group), catalogue)
    return Component(bound.name, catalogue.make(group, bound.name), bound.config)


def _bind_all(
    model: type[BaseModel], value: Any, data: Mapping[str, Any], catalogue: Catalogue
) -> tuple[dict[Path, BoundChoice], list[ConfigProblem]]:
    bound: dict[Path, BoundChoice] = {}
    problems: list[ConfigProblem] = []
    for spot in walk(model, value):
        uses = spot.mark(Uses)
        choice = _as_choice(spot.value) if uses is not None else None
        if choice is None:
            continue
        try:
            bound[spot.path] = _bind(choice, uses, catalogue)
        except ConfigProblems as error:
            problems.extend(problem.below(spot.path) for problem in error.problems)
        except PluginError as error:
            path = (*spot.path, "name") if isinstance(at(data, spot.path), Mapping) else spot.path
            told = ConfigProblem(path, error.message, error.found, error.expected, error.fix)
            problems.append(_narrowed(told, choice.name, uses, catalogue))
    return bound, problems


def _narrowed(problem: ConfigProblem, name: str, uses: Uses, catalogue: Catalogue) -> ConfigProblem:
    """Return the problem of a component that there is not, with those alone that the option takes."""
    known = catalogue.names(uses.group)
    if not uses.having or name in known or problem.suggestion not in (None, did_you_mean(name, known)):
        return problem
    taken = list(fitting(uses, catalogue))
    fix = did_you_mean(name, taken) or "take one of those expected"
    return replace(problem, expected=f"one of {listed(taken)}", suggestion=fix)


def _as_choice(value: Any) -> Choice | None:
    """Return raw data or a choice as a choice; None when it has not the shape of one."""
    if isinstance(value, Choice):
        return value
    if isinstance(value, str):
        return Choice(name=value)
    if isinstance(value, Mapping) and isinstance(value.get("name"), str):
        return Choice.model_validate({str(key): item for key, item in value.items()})
    return None


def _bind(choice: Choice, uses: Uses, catalogue: Catalogue) -> BoundChoice:
    target = catalogue.load(uses.group, choice.name)
    if not fits(target, uses):
        raise _misfit(choice.name, target, uses, catalogue)
    config = validate_config(config_of(target), choice.options, catalogue)
    return BoundChoice.bind(catalogue.entry(uses.group, choice.name).registration.name, config, target)


def _misfit(name: str, target: Any, uses: Uses, catalogue: Catalogue) -> PluginError:
    """Return the error about a component that an option does not take, with what takes it."""
    others = takers(target, uses.group, catalogue)
    owners = listed(f"`{stage}` (option `{option}`)" for stage, option in others)
    known = ", ".join(fitting(uses, catalogue))
    return PluginError(
        f"the {uses.group} `{name}` does not fit here",
        found=traits(target, uses),
        expected=f"one of {known}" if known else "one that is not installed",
        fix=f"take one of these, or a stage that takes `{name}`: {owners}" if others else None,
    )


def _replaced(value: Any, bound: Mapping[Path, BoundChoice], path: Path) -> Any:
    """Return `value` with the choices at these paths replaced."""
    if path in bound:
        return bound[path]
    if isinstance(value, Choice):
        return value
    if isinstance(value, BaseModel):
        old = {name: getattr(value, name) for name in type(value).model_fields}
        new = {name: _replaced(item, bound, (*path, name)) for name, item in old.items()}
        return value.model_copy(update={name: new[name] for name in new if new[name] is not old[name]})
    if isinstance(value, list | tuple):
        items = [_replaced(item, bound, (*path, index)) for index, item in enumerate(value)]
        return type(value)(items)
    if isinstance(value, dict):
        return {key: _replaced(item, bound, (*path, key)) for key, item in value.items()}
    return value


def _ordered(value: Any, unordered: frozenset[Path], path: Path) -> Any:
    """Return JSON data with the items of sets in an order that is the same in every process."""
    if path in unordered:
        return sorted(value, key=canonical)
    if isinstance(value, dict):
        return {key: _ordered(item, unordered, (*path, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_ordered(item, unordered, (*path, index)) for index, item in enumerate(value)]
    return value


def _without(value: Any, left_out: frozenset[Path], path: Path) -> Any:
    """Return JSON data without what stands at these paths."""
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if (*path, key) not in left_out}
        return {key: _without(item, left_out, (*path, key)) for key, item in kept.items()}
    if isinstance(value, list):
        indices = [index for index in range(len(value)) if (*path, index) not in left_out]
        return [_without(value[index], left_out, (*path, index)) for index in indices]
    return value
