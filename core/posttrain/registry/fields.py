"""A walk over the options of a config: every value with its declared type and marks.

The walk goes into nested models, lists, mappings and, once they are bound, the options of components. It
works on validated configs and, as far as shapes allow, on the raw data that a config is to be made of.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, PrivateAttr

from posttrain.contracts.component import Choice, Config, Uses

Path = tuple[str | int, ...]


class BoundChoice(Choice):
    """A choice whose options were validated: all of them with their defaults, and the config they make."""

    _config: Config = PrivateAttr()
    _plugin: Any = PrivateAttr(default=None)

    @classmethod
    def bind(cls, name: str, config: Config, plugin: Any = None) -> BoundChoice:
        """Make the complete choice of a component, which `plugin` is, and its validated config."""
        bound = cls(name=name, **config.model_dump(mode="json"))
        bound._config = config
        bound._plugin = plugin
        return bound

    @property
    def config(self) -> Config:
        """The component's validated config."""
        return self._config

    @property
    def plugin(self) -> Any:
        """What is registered under the name: a class, or the component itself."""
        return self._plugin

    @property
    def watches_only(self) -> bool:
        """Whether the component says that it cannot change results, so that it belongs in no key."""
        return bool(getattr(self._plugin, "watches_only", False))


@dataclass(frozen=True)
class Spot:
    """One value in a config.

    Args:
        path: Where it is: keys and list indices.
        annotation: Its declared type, without `Annotated`.
        marks: The metadata declared for it, or for the list or mapping it is in.
        value: The value.
        model: The model it is an instance of or, in raw data, is to become.
    """

    path: Path
    annotation: Any
    marks: tuple[Any, ...]
    value: Any
    model: type[BaseModel] | None = None

    def mark(self, kind: type[Any]) -> Any:
        """Return the mark of this kind, or None."""
        return next((mark for mark in self.marks if isinstance(mark, kind)), None)


def walk(model: type[BaseModel], value: Any, path: Path = ()) -> Iterator[Spot]:
    """Yield every spot of `value`, outer ones first. `value` is an instance of `model` or raw data for it."""
    yield from _visit(model, (), value, path)


def unset(model: type[BaseModel], value: Any) -> Iterator[tuple[Path, tuple[Any, ...]]]:
    """Yield the path of every field that is None, which `walk` leaves out, with all its marks."""
    for spot in walk(model, value):
        if isinstance(spot.value, BaseModel):
            holder = spot.value.config if isinstance(spot.value, BoundChoice) else spot.value
            for name, field in type(holder).model_fields.items():
                if getattr(holder, name) is None:
                    yield (*spot.path, name), (*field.metadata, *marks_of(field.annotation))


def type_name(annotation: Any, marks: tuple[Any, ...] = ()) -> str:
    """Return how a declared type is shown to people, such as `float | None` or `list[loss]`."""
    annotation, marks = _unwrapped(annotation, marks)
    uses = next((mark for mark in marks if isinstance(mark, Uses)), None)
    if uses is not None and annotation is Choice:
        return str(uses.group)
    arguments = get_args(annotation)
    if _is_union(annotation):
        return " | ".join(type_name(each, marks) for each in arguments)
    if get_origin(annotation) is Literal:
        return " | ".join(repr(each.value if isinstance(each, Enum) else each) for each in arguments)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " | ".join(repr(each.value) for each in annotation)
    if annotation is type(None):
        return "null"
    name = str(getattr(get_origin(annotation) or annotation, "__name__", annotation))
    inner = ", ".join("..." if each is ... else type_name(each, marks) for each in arguments)
    return f"{name}[{inner}]" if inner else name


def _visit(annotation: Any, marks: tuple[Any, ...], value: Any, path: Path) -> Iterator[Spot]:
    annotation, marks = _unwrapped(annotation, marks)
    if value is None:
        return
    if _is_union(annotation):
        arm = _arm(annotation, value)
        if arm is not None:
            yield from _visit(arm, marks, value, path)
        return
    model = _model_of(annotation, value)
    yield Spot(path, annotation, marks, value, model)
    if isinstance(value, BoundChoice):
        yield from _fields(type(value.config), value.config, path)
    elif model is not None and not issubclass(model, Choice):
        yield from _fields(model, value, path)
    elif isinstance(value, list | tuple | Mapping) and annotation is not Choice:
        yield from _items(annotation, marks, value, path)


def _unwrapped(annotation: Any, marks: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    while True:
        if get_origin(annotation) is Annotated:
            annotation, *more = get_args(annotation)
            marks = (*more, *marks)
        elif hasattr(annotation, "__value__"):  # a named type alias
            annotation = annotation.__value__
        else:
            return annotation, marks


def marks_of(annotation: Any) -> tuple[Any, ...]:
    """Return the marks of a type and of every arm of a union."""
    annotation, marks = _unwrapped(annotation, ())
    arms = get_args(annotation) if _is_union(annotation) else ()
    return (*marks, *(mark for arm in arms for mark in marks_of(arm)))


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def _arm(annotation: Any, value: Any) -> Any:
    """Return the first arm of a union that `value` has the shape of; None when that cannot be told."""
    fitting = [arm for arm in get_args(annotation) if _fits(arm, value)]
    models = [arm for arm in fitting if _is_model(_unwrapped(arm, ())[0])]
    if len(models) > 1 and isinstance(value, Mapping):
        named = [arm for arm in models if _names(_unwrapped(arm, ())[0], value)]
        return named[0] if len(named) == 1 else None  # raw data for one of several models
    return fitting[0] if fitting else None


def _names(model: type[BaseModel], value: Mapping[str, Any]) -> bool:
    """Whether raw data names this model, with every field that only it has a literal value for."""
    literals = {
        name: get_args(field.annotation)
        for name, field in model.model_fields.items()
        if field.is_required() and get_origin(field.annotation) is Literal
    }
    return bool(literals) and all(value.get(name) in allowed for name, allowed in literals.items())


def _fits(annotation: Any, value: Any) -> bool:
    annotation, _ = _unwrapped(annotation, ())
    if _is_union(annotation):
        return any(_fits(arm, value) for arm in get_args(annotation))
    if get_origin(annotation) is Literal:
        return value in get_args(annotation)
    if annotation is Choice:
        return isinstance(value, Choice | Mapping | str)
    if _is_model(annotation):
        return isinstance(value, annotation | Mapping)
    kind = get_origin(annotation) or annotation
    if not isinstance(kind, type):
        return True
    return isinstance(value, kind) or (kind in (tuple, set, frozenset) and isinstance(value, list))


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _model_of(annotation: Any, value: Any) -> type[BaseModel] | None:
    if isinstance(value, BaseModel):
        return type(value)
    return annotation if _is_model(annotation) and isinstance(value, Mapping | str) else None


def _fields(model: type[BaseModel], value: Any, path: Path) -> Iterator[Spot]:
    read = (lambda name: getattr(value, name)) if isinstance(value, BaseModel) else _reader(value)
    for name, field in model.model_fields.items():
        yield from _visit(field.annotation, tuple(field.metadata), read(name), (*path, name))


def _reader(value: Any) -> Any:
    return value.get if isinstance(value, Mapping) else lambda name: None


def _items(annotation: Any, marks: tuple[Any, ...], value: Any, path: Path) -> Iterator[Spot]:
    arguments = get_args(annotation)
    if isinstance(value, Mapping):
        inner = arguments[1] if len(arguments) == 2 else Any
        for key, item in value.items():
            yield from _visit(inner, marks, item, (*path, key))
        return
    fixed = get_origin(annotation) is tuple and arguments[-1:] != (...,)
    for index, item in enumerate(value):
        inner = arguments[index] if fixed and index < len(arguments) else (arguments or (Any,))[0]
        yield from _visit(inner, marks, item, (*path, index))
