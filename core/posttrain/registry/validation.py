"""The contracts as checks: what a loaded plugin object of each group must be like.

Every check yields what is wrong, in words that complete "breaks the contract: …".
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.artifacts.kinds import Kind
from posttrain.contracts.backend import Backend
from posttrain.contracts.callback import Callback
from posttrain.contracts.component import Config, NoOptions
from posttrain.contracts.format import Format
from posttrain.contracts.loss import Family, Loss, Need, Scope
from posttrain.contracts.registration import Group, Registration
from posttrain.contracts.reward import ModelReward
from posttrain.contracts.rule import CODE, Rule
from posttrain.contracts.stage import Level, Port, Stage, StageConfig
from posttrain.contracts.trainer import Trainer

Faults = Iterator[str]
TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
"""What a lazy target looks like: `module:attribute`."""


HELD: Mapping[Family, frozenset[Need]] = {
    Family.TOKEN: frozenset({Need.ENTROPY, Need.SQUARES, Need.MEAN_LOGP}),
    Family.PREFERENCE: frozenset(
        {Need.REFERENCE, Need.REFERENCE_TOKENS, Need.SQUARES, Need.AUTHORS, Need.PREFERENCE}
    ),
    Family.THREE_WAY: frozenset(),
    Family.UNPAIRED: frozenset({Need.REFERENCE, Need.MISMATCHED}),
    Family.REWARD: frozenset({Need.RIVALS, Need.MARGIN}),
    Family.PROCESS_REWARD: frozenset(),
}
"""What the batch of each family can hold beside log-probs."""


def faults(group: Group, target: Any) -> Faults:
    """Yield what is wrong with `target` as a plugin of `group`."""
    yield from _CHECKS[group](target)


def config_of(plugin: Any) -> type[Config]:
    """Return the option model of a component; one without the attribute has no options."""
    model: type[Config] = getattr(plugin, "config", NoOptions)
    return model


def _stage(target: Any, base: Any = Stage) -> Faults:
    derived = isinstance(target, type) and issubclass(target, base)
    if not derived:
        yield f"it must be a subclass of posttrain.{base.__name__}, but is {target!r:.120}"
        return
    if inspect.isabstract(target):
        yield f"it does not define {', '.join(sorted(target.__abstractmethods__))}"
    yield from _target(target)
    yield from _shared(target.shared)
    yield from _model(target.config, StageConfig)
    yield from _ports(target.inputs)
    if isinstance(target.config, type) and issubclass(target.config, StageConfig):
        for name in set(target.tiny) - set(target.config.model_fields):
            yield f"`tiny` sets {name!r}, which is no option"
    yield from _takes(target, "the constructor")
    yield from _takes(target.estimate, "estimate", "self", "config", "inputs", "gpus")


def _target(target: Any) -> Faults:
    task = getattr(target, "target", None)
    if not (isinstance(task, str) and TARGET.fullmatch(task)):
        yield f"`target` must be 'module:function', but is {task!r:.80}"


def _shared(versions: Any) -> Faults:
    sound = isinstance(versions, Mapping) and all(
        isinstance(name, str) and type(version) is int for name, version in versions.items()
    )
    if not sound:
        yield f"`shared` must map names to numerics versions, but is {versions!r:.80}"


def _trainer(target: Any) -> Faults:
    wrong = list(_stage(target, Trainer))
    yield from wrong
    if not (isinstance(target, type) and issubclass(target, Trainer)):
        return
    yield from _family(target)
    formats = getattr(target, "formats", None)
    if not (isinstance(formats, frozenset) and formats and all(isinstance(each, str) for each in formats)):
        yield f"`formats` must be a frozenset of dataset formats, but is {formats!r:.80}"
    yield from _takes(target.passages, "passages", "self", "row", "format", "needs")
    yield from _takes(target.supervise, "supervise", "self", "config")
    yield from _takes(target.supervise_held_out, "supervise_held_out", "self", "config")
    yield from _takes(target.batch, "batch", "self", "scores", "config")
    yield from _takes(target.needs, "needs", "self", "config")
    yield from _takes(target.rows, "rows", "self", "rows", "format", "needs", "seed")
    yield from _takes(target.verdicts, "verdicts", "self", "row", "format", "needs")
    yield from _takes(target.remarks, "remarks", "self", "examples")


def _loss(target: Any) -> Faults:
    if not (isinstance(target, type) and issubclass(target, Loss)):
        yield f"it must be a subclass of posttrain.Loss, but is {target!r:.120}"
        return
    yield from _family(target)
    needs = target.needs
    if not (isinstance(needs, frozenset) and all(isinstance(each, Need) for each in needs)):
        yield f"`needs` must be a frozenset of posttrain.Need, but is {needs!r:.80}"
    elif isinstance(target.family, Family):
        for need in sorted(needs - HELD[target.family]):
            yield f"it needs `{need}`, which no batch of the family {target.family} holds"
        if target.scope is Scope.STEP and Need.MISMATCHED in needs:
            yield f"it sees the whole step and needs `{Need.MISMATCHED}` answers, which are measured apart from it: \
leave `scope` as it is and read them in `measure`"
    if not isinstance(target.scope, Scope):
        yield f"`scope` must be a posttrain.Scope ({', '.join(map(str, Scope))}), but is {target.scope!r:.80}"
    told = target.metrics
    if not (told is None or (isinstance(told, frozenset) and all(isinstance(each, str) for each in told))):
        yield f"`metrics` must be a frozenset of names, or None, but is {told!r:.80}"
    if target.__call__ is Loss.__call__:
        yield "it defines no __call__(batch, config, stats, state)"
    yield from _component(target, "batch", "config", "stats", "state")
    yield from _takes(target.measure, "measure", "self", "batch", "config", "state")
    yield from _takes(target.begin, "begin", "self", "config")
    yield from _takes(target.advance, "advance", "self", "state", "stats", "config")
    yield from _takes(target.needs_of, "needs_of", "self", "config")


def _backend(target: Any) -> Faults:
    if not (isinstance(target, type) and issubclass(target, Backend)):
        yield f"it must be a subclass of posttrain.Backend, but is {target!r:.120}"
        return
    yield from _target(target)
    yield from _options(target)
    yield from _takes(target, "the constructor")


def _callback(target: Any) -> Faults:
    if not (isinstance(target, type) and issubclass(target, Callback)):
        yield f"it must be a subclass of posttrain.Callback, but is {target!r:.120}"
        return
    yield from _target(target)
    yield from _options(target)
    if not isinstance(target.watches_only, bool):
        yield f"`watches_only` must be true or false, but is {target.watches_only!r:.80}"
    yield from _takes(target, "the constructor")
    yield from _takes(target.problems, "problems", "self", "config", "training")
    yield from _takes(target.ports, "ports", "self", "config")


def _format(target: Any) -> Faults:
    if not (isinstance(target, type) and issubclass(target, Format)):
        yield f"it must be a subclass of posttrain.Format, but is {target!r:.120}"
        return
    yield from _options(target)
    yield from _takes(target, "the constructor")
    columns = getattr(target, "columns", None)
    if not (isinstance(columns, tuple) and columns and all(isinstance(each, str) for each in columns)):
        yield f"`columns` must be a tuple of column names, but is {columns!r:.80}"
    if target.becomes is not None and target.rows is Format.rows:
        yield f"its rows become `{target.becomes}`, but it defines no rows(row)"


def _reward(target: Any) -> Faults:
    if not (isinstance(target, type) and issubclass(target, ModelReward)):
        yield from _component(target, "samples", "config")
        return
    if inspect.isabstract(target):
        yield f"it does not define {', '.join(sorted(target.__abstractmethods__))}"
    yield from _options(target)
    yield from _takes(target, "the constructor")
    yield from _takes(target.open, "open", "self", "model", "context", "config")
    yield from _takes(target.check, "check", "self", "model", "config")
    kinds = getattr(target, "models", None)
    if not (isinstance(kinds, frozenset) and kinds and all(isinstance(each, Kind) for each in kinds)):
        yield f"`models` must be a frozenset of posttrain.Kind, but is {kinds!r:.80}"


def _generator(target: Any) -> Faults:
    if not isinstance(getattr(target, "format", None), str):
        yield f"`format` must be a dataset format, but is {getattr(target, 'format', None)!r:.80}"
    columns = getattr(target, "columns", None)
    if not (isinstance(columns, tuple) and columns and all(isinstance(each, str) for each in columns)):
        yield f"`columns` must be a tuple of column names, but is {columns!r:.80}"
    yield from _component(target, "config", "rows", "seed")


def _options(target: Any) -> Faults:
    yield from _model(config_of(target), Config)
    if "name" in getattr(config_of(target), "model_fields", ()):
        yield "an option cannot be called 'name': that is where the component's own name stands"


def _component(target: Any, *arguments: str) -> Faults:
    yield from _options(target)
    if not isinstance(target, type):
        yield from _takes(target, "it", *arguments)
        return
    yield from _takes(target, "the constructor")
    if any("__call__" in cls.__dict__ for cls in target.__mro__):
        yield from _takes(target.__call__, "__call__", "self", *arguments)
    else:
        yield f"it must be callable with ({', '.join(arguments)}), but defines no __call__"


def _rule(target: Any) -> Faults:
    if not (isinstance(target, type) and issubclass(target, Rule)):
        yield f"it must be a subclass of posttrain.Rule, but is {target!r:.120}"
        return
    code = getattr(target, "code", None)
    if not (isinstance(code, str) and re.fullmatch(CODE, code)):
        yield f"`code` must be letters and a number, such as `ACME07`, but is {code!r:.80}"
    for name in ("title", "fix"):
        text = getattr(target, name, None)
        if not (isinstance(text, str) and text.strip()) or "\n" in text:
            yield f"`{name}` must be one line of text, but is {text!r:.80}"
    if not isinstance(getattr(target, "level", None), Level):
        yield f"`level` must be a posttrain.Level ({', '.join(Level)})"
    if not target.__doc__:
        yield "it has no docstring to explain the failure with"
    yield from _takes(target, "the constructor")
    yield from _takes(target.check, "check", "self", "site")


def _methods(**signatures: tuple[str, ...]) -> Callable[[Any], Faults]:
    def check(target: Any) -> Faults:
        if not isinstance(target, type):
            yield f"it must be a class, but is {target!r:.120}"
            return
        yield from _takes(target, "the constructor")
        for name, arguments in signatures.items():
            yield from _takes(getattr(target, name, None), name, "self", *arguments)

    return check


def _command(target: Any) -> Faults:
    if callable(target):
        return
    if not isinstance(target, tuple):
        yield f"it must be a function, but is {target!r:.120}"
        return
    if not (target and all(isinstance(each, Registration) for each in target)):
        yield f"a group of verbs must be a tuple of posttrain.Registration, but is {target!r:.120}"
        return
    for name, count in Counter(each.name for each in target).items():
        if count > 1:
            yield f"the verb {name!r} is there {count} times"


def _recipe(target: Any) -> Faults:
    if not Path(target).is_file():
        yield f"there is no file {target}"


_CHECKS: dict[Group, Callable[[Any], Faults]] = {
    Group.STAGE: _stage,
    Group.TRAINER: _trainer,
    Group.LOSS: _loss,
    Group.BACKEND: _backend,
    Group.CALLBACK: _callback,
    Group.FORMAT: _format,
    Group.REWARD: _reward,
    Group.GENERATOR: _generator,
    Group.RULE: _rule,
    Group.RUNNER: _methods(run=("execution",)),
    Group.TRACKER: _methods(sync=("workspace", "run"), behind=("workspace", "run")),
    Group.COMMAND: _command,
    Group.RECIPE: _recipe,
}


def _family(target: Any) -> Faults:
    family = getattr(target, "family", None)
    if not isinstance(family, Family):
        yield f"`family` must be a posttrain.Family ({', '.join(map(str, Family))}), but is {family!r:.80}"


def _model(model: Any, base: type[Config]) -> Faults:
    if not (isinstance(model, type) and issubclass(model, base)):
        yield f"`config` must be a subclass of posttrain.{base.__name__}, but is {model!r:.80}"
        return
    if model.model_config.get("extra") != "forbid" or not model.model_config.get("frozen"):
        yield "`config` must keep extra='forbid' and frozen=True"
    for name, field in model.model_fields.items():
        if field.alias or field.validation_alias or field.serialization_alias:
            yield f"the option {name!r} has an alias; an option has one name"


def _ports(ports: Iterable[Any]) -> Faults:
    if not (isinstance(ports, tuple) and all(isinstance(port, Port) for port in ports)):
        yield f"`inputs` must be a tuple of posttrain.Port, but is {ports!r:.80}"
        return
    for name, count in Counter(port.name for port in ports).items():
        if count > 1:
            yield f"the input port {name!r} is declared {count} times"


def _takes(function: Any, label: str, *arguments: str) -> Faults:
    """Check that a function can be called with these positional arguments."""
    if not callable(function):
        yield f"{label} is missing" if function is None else f"{label} is not callable"
        return
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # built-in callables have no signature to look at
    try:
        signature.bind(*arguments)
    except TypeError as error:
        wanted = ", ".join(argument for argument in arguments if argument != "self")
        yield f"{label} must take ({wanted}), but is {label}{signature}: {error}"
