"""Kinds of faults that users of training tools met elsewhere, tried on the whole product."""

from __future__ import annotations

import ast
import json
import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from helpers.lab import Concurrent, Lab
from helpers.products import Done, Product, processes_in, read_all
from helpers.training import completion_rows, context_for, model_artifact, train, weights

from posttrain.contracts.runner import NodeStatus, Runner
from posttrain.errors import ExitCode, SpecError
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
    "data.best_of_n": {"reward": "exact"},
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


@pytest.mark.parametrize("runner", [SequentialRunner, Concurrent])
@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("how", ["raise", "kill", "exit"])
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


# A secret stays where it was declared.

CANARY, OTHER = "canary-7f3a9c51d2e84b60", "canary-e5510b7742aa91cd"

LEAKY = '''\
import json
import os
import sys
import time

import posttrain
from posttrain.artifacts.kinds import DatasetFacts, Kind
from posttrain.contracts.stage import Outcome, Port, Secret, Stage, StageConfig

POSTTRAIN_API = ">=1,<2"


class Options(StageConfig):
    """Options of `leaky`.

    Args:
        token: Logs in.
        fails: Whether it raises.
    """

    token: Secret = "env:CANARY"
    fails: bool = False


class Leaky(Stage):
    """Says everything it knows."""

    config = Options
    target = f"{__name__}:run"

    def outputs(self, config):
        return (Port("data", frozenset({Kind.DATASET}), frozenset({"text"})),)


def run(context):
    token = context.secret(context.config.token)
    print("printed", token, flush=True)
    print("complained", token, file=sys.stderr, flush=True)
    context.note(f"noted {token}")
    context.progress(1, 2, f"units of {token}")
    time.sleep(1)
    if context.config.fails:
        raise RuntimeError(f"https://user:{token}@example.org refused {token}")
    known = sorted(name for name in os.environ if "CANARY" in os.environ[name] or "canary" in os.environ[name])
    (context.output("data") / "rows.jsonl").write_text(json.dumps({"text": " ".join(known)}) + "\\n")
    (context.output("data") / "prompts.txt").write_text("")
    context.describe("data", Kind.DATASET, DatasetFacts(format="text", rows=1))
    return Outcome(summary=f"logged in with {token}")


@posttrain.hookimpl
def posttrain_stages():
    return [posttrain.Registration("leaky", "Says everything.", Leaky)]
'''

SECRETIVE = """\
name: secretive
plugins: [./leaky.py]
stages:
  quiet: {uses: data.synthetic, with: {generator: reverse, rows: 9}, runtime: {env: {MY_TOKEN: "env:CANARY"}}}
  leaky: {uses: leaky, with: {token: "env:CANARY"}}
"""


@pytest.fixture
def secretive(tmp_path: Path) -> Product:
    product = Product(tmp_path, env={"CANARY": CANARY, "HF_TOKEN": OTHER, "MLFLOW_TRACKING_TOKEN": OTHER})
    product.write("leaky.py", LEAKY)
    product.write("p.yaml", SECRETIVE)
    return product


def holding(product: Product) -> Iterator[str]:
    """Yield the files that hold a secret."""
    for path, data in read_all(product.base):
        if CANARY.encode() in data or OTHER.encode() in data:
            yield str(path)


def clean(product: Product, done: Done) -> None:
    assert CANARY not in done.text and OTHER not in done.text
    assert list(holding(product)) == []


@pytest.mark.slow
@pytest.mark.prefect
@pytest.mark.mlflow
@pytest.mark.parametrize("fails", [False, True])
def test_a_declared_secret_is_written_nowhere(secretive: Product, fails: bool) -> None:
    process = secretive.start("run", "p.yaml", "--set", f"stages.leaky.with.fails={str(fails).lower()}")
    titles: set[str] = set()
    while process.poll() is None:
        titles |= {" ".join(each.cmdline()) for each in processes_in(secretive.base, server=True)}
        time.sleep(0.1)
    out, err = process.communicate()
    assert process.returncode == int(fails), out + err
    assert any("posttrain.execution" in title for title in titles)
    assert not any(CANARY in title or OTHER in title for title in titles)
    assert "[redacted]" in out
    clean(secretive, Done(process.returncode, out, err))
    if not fails:
        digest = secretive.digests()["leaky"]["data"]
        assert (secretive.objects / digest / "rows.jsonl").read_text() == '{"text": "CANARY"}\n'
    for arguments in (("status", "--json"), ("explain", "quiet"), ("store", "ls"), ("down",)):
        clean(secretive, secretive(*arguments))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('token: "env:CANARY"', f"token: {CANARY}"),
        ('MY_TOKEN: "env:CANARY"', f"MY_TOKEN: {CANARY}"),
        ("rows: 9", f"rows: 9, api_key: {CANARY}"),
        ("name: secretive", f"name: secretive\nsecrets: {{token: {CANARY}}}"),
    ],
    ids=["an option", "a variable", "an option that does not exist", "a section that does not exist"],
)
def test_a_secret_in_the_file_is_refused_and_not_repeated(secretive: Product, old: str, new: str) -> None:
    path = secretive.write("p.yaml", SECRETIVE.replace(old, new))
    assert CANARY in path.read_text()
    for verb in ("plan", "run"):
        done = secretive(verb, "p.yaml")
        assert done.code == 2, done.text
        assert "p.yaml:" in done.err
        assert CANARY not in done.text
    assert list(holding(secretive)) == [str(path)]


@pytest.mark.parametrize("key", ["leaky.with.token", "quiet.runtime.env.MY_TOKEN", "quiet.with.api_key"])
def test_a_secret_on_the_command_line_is_refused_and_not_repeated(secretive: Product, key: str) -> None:
    done = secretive("run", "p.yaml", "--set", f"stages.{key}={CANARY}")
    assert done.code == 2, done.text
    assert "--set" in done.err
    clean(secretive, done)


@pytest.mark.slow
@pytest.mark.mlflow
def test_a_secret_that_is_missing_is_named(secretive: Product) -> None:
    bare = Product(secretive.base, env={"CANARY": None})
    done = bare("run", "p.yaml", "--runner", "sequential")
    assert done.code != 0
    assert "CANARY" in done.text and "environment variable" in done.text
    assert "Traceback" not in done.text


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


def test_a_reference_to_a_secret_is_no_value() -> None:
    with pytest.raises(SpecError, match="no reference to a secret") as caught:
        from posttrain.planning.secrets import resolve

        resolve(CANARY, {})
    assert CANARY not in str(caught.value)
