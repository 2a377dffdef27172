"""Kinds of faults that users of training tools met elsewhere, tried on the whole product."""

from __future__ import annotations

import ast
import json
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from helpers.lab import Concurrent, Lab
from helpers.training import completion_rows, context_for, model_artifact, train, weights

from posttrain.contracts.runner import NodeStatus, Runner
from posttrain.errors import ExitCode
from posttrain.execution.sequential import SequentialRunner
from posttrain.pipeline import Pipeline
from posttrain.registry.catalogue import Catalogue
from posttrain.registry.components import ConfigProblems, semantic, validate_config
from posttrain.registry.discovery import discover
from posttrain.registry.fields import walk
from posttrain_plugins.trainers.sft import SftOptions

ROOTS = [Path(__file__).parents[2] / name for name in ("core", "plugins", "pipelines")]
STAGES = discover().stages()
REQUIRED: Mapping[str, Mapping[str, Any]] = {
    "data.synthetic": {"generator": "reverse", "rows": 9},
    "data.load": {"path": "x"},
    "store.load": {"path": "x"},
    "data.best_of_n": {"reward": "exact"},
    "data.convert": {"to": "text"},
    "data.split": {"split": {"test": 0.5}},
    "model.load": {"path": "x"},
    "promote": {"name": "x"},
}
NESTED: Mapping[str, Mapping[str, Any]] = {
    "train.sft": {"lora": {}, "loss": "nll"},
    "train.dpo": {"lora": {}, "loss": "sigmoid"},
}


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    return discover()


# An option that is misspelt must stop the run, wherever it stands.


def option_paths(config: Any) -> Iterator[tuple[str, ...]]:
    """Yield the path of every option that is set, those of components and of nested options too."""
    for spot in walk(type(config), config):
        if spot.path and all(isinstance(part, str) for part in spot.path):
            yield tuple(map(str, spot.path))


@pytest.mark.parametrize("name", STAGES)
def test_no_option_of_any_stage_can_be_misspelt_unnoticed(name: str, catalogue: Catalogue) -> None:
    model = catalogue.stage(name).config
    config = validate_config(model, {**REQUIRED.get(name, {}), **NESTED.get(name, {})}, catalogue)
    paths = list(option_paths(config))
    assert {path[0] for path in paths} >= set(NESTED.get(name, {}))
    for *above, option in paths:
        options = config.model_dump(mode="json")
        holder = options
        for part in above:
            holder = holder[part]
        holder[f"{option}_"] = holder[option]
        if tuple(above) and isinstance(getattr(config, above[0], None), dict):
            continue  # a mapping whose keys are the user's own, such as the names of splits
        with pytest.raises(ConfigProblems) as caught:
            validate_config(model, options, catalogue)
        assert {problem.path for problem in caught.value.problems} == {(*above, f"{option}_")}


# What the command line says wins, also when it says what is the default anyway.


CHANGED = {
    "learning_rate": "0.1", "batch_size": "3", "lr_scheduler_type": "cosine", "optim": "adamw_torch",
    "weight_decay": "0.5", "adam_beta1": "0.5", "adam_beta2": "0.5", "adam_epsilon": "0.5", "max_grad_norm": "7.0",
    "truncation": "drop", "shuffle": "false", "seed": "7", "bf16": "true", "micro_batch_tokens": "77",
    "gradient_checkpointing": "true", "logging_steps": "7", "save_steps": "7", "save_total_limit": "7",
    "num_train_epochs": "7.0", "max_length": "7", "weight_column": "w",
}  # fmt: skip
CHAIN = """\
defaults: {{train.*: {{with: {{{default}}}}}}}
stages:
  rows: {{uses: data.synthetic, with: {{generator: reverse, rows: 9}}}}
  base: {{uses: model.init, inputs: {{data: rows}}}}
  sft: {{uses: train.sft, inputs: {{model: base, data: rows}}, with: {{{stage}}}}}
"""


@pytest.mark.parametrize("option", CHANGED)
def test_the_command_line_beats_the_file_and_the_file_the_defaults(option: str, tmp_path: Path) -> None:
    default = SftOptions.model_fields[option].default
    text = json.dumps(default)
    override = [f"stages.sft.with.{option}={text}"]

    def resolved(default: str, stage: str, sets: list[str]) -> tuple[Any, str]:
        (tmp_path / "p.yaml").write_text(CHAIN.format(default=default, stage=stage))
        node = Pipeline.from_file(tmp_path / "p.yaml", sets).graph().nodes["sft"]
        return getattr(node.config, option), node.origins[option]

    written = f"{option}: {CHANGED[option]}"
    from_defaults, place = resolved(written, "", [])
    assert from_defaults != default and place.endswith("p.yaml:1:" + place.rpartition(":")[2])
    from_stage, place = resolved(f"{option}: {text}", written, [])
    assert from_stage == from_defaults and ":5:" in place
    last, place = resolved(written, written, override)
    assert last == default
    assert place.startswith("--set")


# What changes the outputs is in the key.


@pytest.mark.parametrize("name", STAGES)
def test_every_option_that_is_not_marked_is_in_the_key(name: str, catalogue: Catalogue) -> None:
    config = validate_config(catalogue.stage(name).config, REQUIRED.get(name, {}), catalogue)
    marked = {
        option
        for option, field in type(config).model_fields.items()
        if any(
            mark in repr((field.metadata, field.annotation))
            for mark in ("VolatileMark", "SourceMark", "SecretMark")
        )
    }
    assert semantic(config).keys() == type(config).model_fields.keys() - marked


# A stage that failed fails the run, wherever it stands and whoever orders the stages.


WAYS = ("raise", "kill", "exit")
RUNNERS = (SequentialRunner, Concurrent)


@pytest.mark.parametrize(
    ("runner", "position", "how"),
    [
        # Each pair of the three is tried in the quick tests, and all of them together in the slow ones.
        pytest.param(
            runner, position, how, marks=() if (position + way + chosen) % 2 == 0 else pytest.mark.slow
        )
        for way, how in enumerate(WAYS)
        for position in range(3)
        for chosen, runner in enumerate(RUNNERS)
    ],
)
def test_a_failure_is_never_lost(
    runner: Callable[[], Runner], position: int, how: str, tmp_path: Path
) -> None:
    names = ["a", "b", "c"]
    pipeline: dict[str, Any] = {"a": {"uses": "test/write"}}
    for before, name in pairwise(names):
        pipeline[name] = {"uses": "test/copy", "inputs": {"data": before}}
    if position == 0:
        pipeline = {"first": {"uses": "test/write"}, **pipeline}
        pipeline["a"] = {"uses": "test/fail", "inputs": {"data": "first"}, "with": {"how": how}}
    else:
        pipeline[names[position]] |= {"uses": "test/fail", "with": {"how": how}}
    report = Lab(tmp_path).run(pipeline, runner=runner())
    assert report.exit_code == ExitCode.FAILED
    ends = {name: report.results[name].status for name in names}
    assert ends == {
        name: NodeStatus.COMPLETED
        if index < position
        else NodeStatus.FAILED
        if index == position
        else NodeStatus.SKIPPED
        for index, name in enumerate(names)
    }


# Nothing that was found on disk is executed.


class Bomb:
    """Makes a directory when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.place),))


FOREIGN = (
    "optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "pytorch_model.bin", "trainer_state.pkl",
)  # fmt: skip


def test_pickles_beside_a_checkpoint_are_never_opened(tmp_path: Path) -> None:
    model = model_artifact(tmp_path / "model")
    options = {"max_steps": 4, "batch_size": 4, "save_steps": 2}

    def context(name: str) -> Any:
        return context_for(
            tmp_path / name, "train.sft", model, completion_rows(), "prompt_completion", **options
        )

    train(context("whole"))

    def die(done: int, unit: str) -> None:
        if unit == "steps" and done == 3:
            raise KeyboardInterrupt

    first = context("resumed")
    first.on_progress = die
    with pytest.raises(KeyboardInterrupt):
        train(first)
    (checkpoint,) = (tmp_path / "resumed" / "work" / "checkpoints").glob("step-*")
    for place in (checkpoint, checkpoint.parent, checkpoint.parent.parent):
        for name in FOREIGN:
            (place / name).write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    second = context("resumed")
    train(second)
    assert "going on from step 2 of 4" in second.notes
    assert not (tmp_path / "exploded").exists()
    one, other = (weights(tmp_path / name / "out-model") for name in ("whole", "resumed"))
    assert all(bool((one[name] == other[name]).all()) for name in one)


FORBIDDEN = {"eval", "exec", "pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}


def used(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module).partition(".")[0]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            yield "" if any(word.arg == "weights_only" for word in node.keywords) else "pickle"


def test_no_source_unpickles_or_evaluates() -> None:
    found = {
        str(path): FORBIDDEN.intersection(used(ast.parse(path.read_text())))
        for root in ROOTS
        for path in root.rglob("*.py")
    }
    assert {path: names for path, names in found.items() if names} == {}
