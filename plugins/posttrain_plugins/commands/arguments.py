"""Options of a stage as a command line spells them: `--learning_rate 2e-5`, `--lora.r 16`, `--loss simpo`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from posttrain.contracts.component import Config, Uses
from posttrain.errors import PosttrainError, SpecError
from posttrain.planning.overrides import assign
from posttrain.planning.problems import SpecProblems
from posttrain.planning.tree import resolve_plain
from posttrain.registry.catalogue import Catalogue
from posttrain.registry.components import ConfigProblems, validate_config
from posttrain.registry.options import describe
from posttrain.registry.validation import config_of
from posttrain.wording import listed
from posttrain_plugins.commands.synonyms import CHOSEN, COMMANDS
from posttrain_plugins.commands.values import arms_of, is_text, leaf_at, unescaped, value_of
from posttrain_plugins.commands.wording import flagged
from posttrain_plugins.training.elsewhere import ELSEWHERE

_MARK = "--"
_OPTION = re.compile(r"(?<![\w-])--(?!help\b)(?=\w)")
"""Where an option begins in a text."""
_SIMILAR = 0.75
"""How alike names of options are of which one may be meant for the other."""
_NUMBER = re.compile(r"^(it is `|`batch_size: )[^`\d]*?(-?\d[\d.e+-]*)\}*`")
"""The number of the first option in a hint that says which one is meant."""


@dataclass(frozen=True)
class Argument:
    """One option as it was given: its path, and the words behind it."""

    path: tuple[str, ...]
    words: tuple[str, ...]

    @property
    def spelled(self) -> str:
        """The option as people write it."""
        return _MARK + ".".join(self.path)


def options(
    model: type[Config], words: Sequence[str], catalogue: Catalogue, given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the options that words of a command line give, as a pipeline file would hold them.

    Args:
        model: The option model.
        words: `--NAME VALUE`, `--NAME=VALUE`, several values for a list, `--FLAG` and `--no_FLAG` for truth values; a
            name with dots leads into an option. Dashes and underscores in names mean the same.
        catalogue: Knows the components that options name.
        given: Options that the words beat.

    Raises:
        SpecError: A word is no option, or options are unknown, or values are missing or malformed: all of these.
    """
    told = Told()
    made = gathered(model, words, catalogue, given, told)
    told.conclude()
    return made


def gathered(
    model: type[Config],
    words: Sequence[str],
    catalogue: Catalogue,
    given: Mapping[str, Any] | None,
    told: Told,
) -> dict[str, Any]:
    """Return those of the options that can be read; as `options`, but what is wrong is left with `told`."""
    tree: dict[str, Any] = {"with": {}}
    found: list[Argument] = []
    with told.each():
        found = list(_arguments(words))
    for name, value in (given or {}).items():
        with told.each():
            path = _known(tuple(str(name).split(".")), model, catalogue, tree["with"], [str(value)])
            assign(tree, ("with", *path), value, f"the option {name}")
    # Unknown options come last: what they are told depends on the components that are chosen.
    for argument in sorted(
        found, key=lambda each: (_plain(each.path[0]) not in model.model_fields, len(each.path))
    ):
        with told.each():
            path, value = _read(argument, model, catalogue, tree["with"])
            for each in _of_each(path, model, catalogue, tree["with"]):
                assign(tree, ("with", *each), value, argument.spelled)
    made: dict[str, Any] = tree["with"]
    return made


def misfits(model: type[Config], given: Mapping[str, Any], catalogue: Catalogue, told: Told) -> None:
    """Tell which values do not fit, beside options that are unknown; what is missing may be one of those."""
    try:
        validate_config(model, given, catalogue)
    except ConfigProblems as several:
        for problem in several.problems:
            if problem.path and (not problem.at_key or len(problem.path) > 1):
                told.add(
                    SpecError(
                        problem.message,
                        where=_MARK + ".".join(map(str, problem.path)),
                        found=problem.found,
                        expected=problem.expected,
                        fix=problem.suggestion,
                    )
                )


class Told:
    """Collects what is wrong, so that all of it is told at once."""

    def __init__(self) -> None:
        self._problems: list[PosttrainError] = []

    def __bool__(self) -> bool:
        return bool(self._problems)

    def add(self, problem: PosttrainError) -> None:
        """Keep one more problem."""
        self._problems.append(problem)

    def take(self, other: Told, loads: str) -> None:
        """Keep the problems with options of what is loaded, which begin with its name and a dot."""
        for problem in other._problems:
            for part in ("message", "where", "found", "fix"):
                text = getattr(problem, part)
                if text is not None:
                    setattr(problem, part, _OPTION.sub(rf"\g<0>{loads}.", text))
            self.add(problem)

    @contextmanager
    def each(self) -> Iterator[None]:
        """Keep the error of the block, if there is one."""
        try:
            yield
        except SpecProblems as error:
            self._problems += error.problems
        except SpecError as error:
            self._problems.append(error)

    def conclude(self) -> None:
        """Raise what was kept.

        Raises:
            SpecError: Something is wrong; `SpecProblems` where several things are.
        """
        if len(self._problems) == 1:
            raise self._problems[0]
        if self._problems:
            raise SpecProblems(self._problems)


def described(model: type[Config], prefix: str = "") -> dict[str, dict[str, Any]]:
    """Return what options are, by name; those of nested models have a dot."""
    found: dict[str, dict[str, Any]] = {}
    for about in describe(model):
        name = f"{prefix}{about['name']}"
        found[name] = about
        for arm in arms_of(model.model_fields[about["name"]].annotation):
            if isinstance(arm, type) and issubclass(arm, Config):
                found |= {
                    inner: each for inner, each in described(arm, f"{name}.").items() if inner not in found
                }
    return found


def _arguments(words: Sequence[str]) -> Iterator[Argument]:
    """Group words by the option before them."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith(_MARK) and len(word) > len(_MARK):
            groups.append(
                list(word.removeprefix(_MARK).partition("=")[::2]) if "=" in word else [word[len(_MARK) :]]
            )
        elif groups:
            groups[-1].append(word)
        else:
            raise SpecError("this is no option", found=word, expected="--NAME VALUE")
    for name, *values in groups:
        yield Argument(tuple(name.split(".")), tuple(values))


def _read(
    argument: Argument, model: type[Config], catalogue: Catalogue, so_far: Mapping[str, Any]
) -> tuple[tuple[str, ...], Any]:
    """Return where an argument belongs and its value."""
    negated = _negated(argument, model)
    if negated is not None:
        return (negated,), False
    path = _known(argument.path, model, catalogue, so_far, argument.words)
    leaf = leaf_at(model, path)
    arms = [] if leaf is None else list(arms_of(leaf.annotation))
    if not argument.words:
        if bool not in arms:
            raise SpecError("this option needs a value", where=argument.spelled)
        return path, True
    many = [arm for arm in arms if (get_origin(arm) or arm) in (list, tuple)]
    alone = [arm for arm in arms if arm not in many]
    if len(argument.words) == 1 and (alone or not many or argument.words[0].startswith("[")):
        word = argument.words[0]
        return path, unescaped(word) if is_text(leaf) else value_of(word, alone, argument.spelled)
    if not many:
        found = " ".join(argument.words)
        raise SpecError(
            "this option takes one value", where=argument.spelled, found=found, fix="put it in quotes"
        )
    inner = [arm for each in many for part in get_args(each)[:1] for arm in arms_of(part)]
    return path, [value_of(word, inner, argument.spelled) for word in argument.words]


def _of_each(
    path: tuple[str, ...], model: type[Config], catalogue: Catalogue, so_far: Mapping[str, Any]
) -> list[tuple[str, ...]]:
    """Return where an option of a component belongs: where several are listed, to each that has it.

    Raises:
        SpecError: None of them has it.
    """
    option, *rest = path
    several = so_far.get(option)
    uses = next((mark for mark in model.model_fields[option].metadata if isinstance(mark, Uses)), None)
    if uses is None or not isinstance(several, list) or not rest or rest[0].isdecimal():
        return [path]
    names = [str(each.get("name") if isinstance(each, Mapping) else each) for each in several]
    known = catalogue.names(uses.group)
    having = [
        str(at)
        for at, name in enumerate(names)
        if name in known and rest[0] in config_of(catalogue.load(uses.group, name)).model_fields
    ]
    if not having and set(names) <= set(known):
        raise SpecError(
            f"none of these has an option `{rest[0]}`", where=_MARK + ".".join(path), found=listed(names)
        )
    return [(option, at, *rest) for at in having]


def _negated(argument: Argument, model: type[Config]) -> str | None:
    """Return the truth value that `--no_NAME` switches off; None for other arguments."""
    first = _plain(argument.path[0])
    name = first.removeprefix("no_")
    if (
        first in model.model_fields
        or name not in model.model_fields
        or len(argument.path) > 1
        or argument.words
    ):
        return None
    return name if bool in arms_of(model.model_fields[name].annotation) else None


def _known(
    path: tuple[str, ...],
    model: type[Config],
    catalogue: Catalogue,
    so_far: Mapping[str, Any],
    words: Sequence[str],
) -> tuple[str, ...]:
    """Return a path with the names that the model has.

    Raises:
        SpecError: It has no such option.
    """
    first, *rest = path
    if _plain(first) not in model.model_fields:
        raise _unknown(first, model, catalogue, so_far, words)
    keyed = any(
        (get_origin(arm) or arm) is dict for arm in arms_of(model.model_fields[_plain(first)].annotation)
    )
    return (_plain(first), *(rest if keyed else map(_plain, rest)))


def _unknown(
    name: str,
    model: type[Config],
    catalogue: Catalogue,
    so_far: Mapping[str, Any],
    words: Sequence[str],
) -> SpecError:
    plain = _plain(name)
    chosen_with, choices = CHOSEN.get(plain, (None, ()))
    if words and choices and set(words) <= set(choices):
        return SpecError(f"there is no {_MARK}{name}", fix=f"it is `{_MARK}{chosen_with} {' '.join(words)}`")
    if plain in COMMANDS or plain in ELSEWHERE:
        hint = COMMANDS.get(plain) or flagged(with_value(ELSEWHERE[plain], words))
        return SpecError(f"there is no {_MARK}{name}", fix=hint)
    choosable: list[str] = []
    for option, field in model.model_fields.items():
        uses = next((mark for mark in field.metadata if isinstance(mark, Uses)), None)
        chosen = so_far.get(option, getattr(field.default, "name", None))
        if isinstance(chosen, Mapping):
            chosen = chosen.get("name", getattr(field.default, "name", None))
        if uses is None or not isinstance(chosen, str) or chosen not in catalogue.names(uses.group):
            continue
        inner = config_of(catalogue.load(uses.group, chosen)).model_fields
        choosable += [f"{option}.{each}" for each in inner]
        if plain in inner:
            fix = f"it is an option of the {uses.group} `{chosen}`: {_MARK}{option}.{plain}"
            return SpecError("there is no such option", found=_MARK + name, fix=fix)
    fix = _similar(plain, [*described(model), *choosable]) or "`--help` lists all of them"
    return SpecError("there is no such option", found=_MARK + name, fix=fix)


def _similar(name: str, known: Sequence[str]) -> str | None:
    """Suggest the option that is called nearly so, by all of its name or by what stands behind its last dot."""
    ends: dict[str, str] = {}
    for each in known:
        ends.setdefault(each.rpartition(".")[2], each)
    same = {each: each for each in known}
    found = next(iter(difflib.get_close_matches(name, [*same, *ends], n=1, cutoff=_SIMILAR)), None)
    return None if found is None else f"did you mean `{_MARK}{same.get(found) or ends[found]}`?"


def with_value(hint: str, words: Sequence[str]) -> str:
    """Return a hint whose first option has the number that was given, where the hint has a number of that type."""
    match = _NUMBER.search(hint)
    value = _number(words[0]) if len(words) == 1 else None
    if match is None or value is None or (isinstance(value, float) and isinstance(_number(match[2]), int)):
        return hint
    return f"{hint[: match.start(2)]}{words[0]}{hint[match.end(2) :]}"


def _number(text: str) -> int | float | None:
    try:
        value = resolve_plain(text)
    except ValueError:
        return None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _plain(name: str) -> str:
    return name.replace("-", "_")
