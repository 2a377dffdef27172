"""What the plan says of the components that options name; and that a backend is no part of a key."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from helpers.contexts import catalogue, configured

from posttrain.artifacts.kinds import Kind
from posttrain.contracts.component import Choice, Uses
from posttrain.contracts.registration import Group
from posttrain.contracts.reward import ModelReward
from posttrain.contracts.stage import Estimate, Level, Port, Stage, StageConfig
from posttrain.planning import requirements
from posttrain.planning.capacity import Machine
from posttrain.planning.keys import plugin_identities
from posttrain.planning.nodes import Node
from posttrain.planning.requirements import crowding, shortfalls
from posttrain.planning.spec import Resources, Runtime
from posttrain.registry.components import choices, semantic
from posttrain.registry.extras import installing
from posttrain.registry.problems import ConfigProblems


def node(backend: Any, *, gpus: int = 0, python: str | None = None, **options: Any) -> Node:
    stage = catalogue().stage("train.sft")
    config = configured(stage, backend=backend, **options)
    return Node(
        name="sft",
        stage="sft",
        uses="train.sft",
        plugin=stage,
        config=config,
        inputs={},
        needs=(),
        resources=Resources(gpus=gpus),
        runtime=Runtime(python=python),
    )


def said(one: Node) -> list[str]:
    return [finding.message for finding in shortfalls(one, catalogue())]


@pytest.mark.parametrize(
    "backend", ["single", {"name": "ddp", "ranks": 4}, "fsdp2", {"name": "deepspeed", "stage": 3}]
)
def test_nothing_is_said_where_nothing_is_missing(backend: Any):
    assert said(node(backend)) == []


def test_a_rank_needs_a_gpu_of_its_own():
    (message,) = said(node({"name": "ddp", "ranks": 4}, gpus=2))
    assert "4 ranks and 2 GPUs" in message
    assert said(node({"name": "ddp", "ranks": 2}, gpus=2)) == []


@pytest.mark.parametrize("backend", ["single", {"name": "ddp", "ranks": 1}])
def test_gpus_that_no_rank_uses_are_told(backend: Any):
    (finding,) = shortfalls(node(backend, gpus=2), catalogue())
    assert finding.level is Level.WARNING and "2 GPUs and 1 rank," in finding.message
    assert said(node(backend, gpus=1)) == []


@pytest.mark.parametrize(
    ("needed", "gpus", "told"),
    [
        (None, 0, []),
        (2**30, 0, []),
        (2**31, 0, ["memory: this machine has 1.0 GiB, and up to 2.0 GiB may be needed"]),
        (2**40, 1, []),
        (
            2**40,
            2,
            ["resources.gpus: this node asks for more GPUs than this machine has: 2, and there are 1"],
        ),
    ],
)
def test_what_a_machine_lacks_is_told(needed: int | None, gpus: int, told: list[str]):
    machine = Machine(cpus=1, gpus=("0",), memory=2**30)
    findings = list(crowding(node("single", gpus=gpus), Estimate(memory_bytes=needed), machine))
    assert [finding.message for finding in findings] == told
    assert {finding.level for finding in findings} <= {Level.WARNING}


@pytest.mark.parametrize(("target", "told"), [("acme_of_this_file:Made", True), (f"{__name__}:Made", False)])
def test_the_module_of_a_target_is_looked_for(target: str, told: bool, monkeypatch: pytest.MonkeyPatch):
    one = node("single", callbacks=["divergence"])
    monkeypatch.setattr(type(catalogue().make(Group.CALLBACK, "divergence")), "target", target)
    assert [message for message in said(one) if "there is no such module" in message] == (
        ["callbacks.0: the target of `divergence` is acme_of_this_file:Made, and there is no such module"]
        if told
        else []
    )


@pytest.mark.parametrize("stage", [1, 2])
def test_an_option_of_another_zero_stage_is_refused(stage: int):
    with pytest.raises(ConfigProblems, match="persistence_threshold would be ignored"):
        node({"name": "deepspeed", "stage": stage, "persistence_threshold": 10})
    assert said(node({"name": "deepspeed", "stage": 3, "persistence_threshold": 10})) == []


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(requirements.importlib.util, "find_spec", lambda name: None)
    (finding,) = shortfalls(node("deepspeed"), catalogue())
    assert "`deepspeed` needs deepspeed" in finding.message
    assert said(node("ddp")) == []
    assert said(node("deepspeed", python="/other/python")) == [], "another interpreter may have it"


@pytest.mark.parametrize(
    ("backend", "options", "expected"),
    [
        ("deepspeed", {"fp16": True}, "fp16"),
        ("deepspeed", {"optim": "adafactor"}, "whole tensors"),
        ("fsdp2", {"optim": "adamw_bnb_8bit"}, "whole tensors"),
        ("fsdp2", {"lora": {"r": 2}, "quantization": {}}, "4 bits"),
    ],
)
def test_what_does_not_go_together_is_refused(backend: str, options: dict[str, Any], expected: str):
    (message,) = said(node(backend, **options))
    assert expected in message
    assert said(node("ddp", **options)) == []


def test_a_backend_is_no_part_of_a_key():
    one, other = node("single"), node({"name": "fsdp2", "ranks": 3})
    assert semantic(one.config) == semantic(other.config)
    identities = [plugin_identities(each.uses, each.config, catalogue()) for each in (one, other)]
    assert identities[0] == identities[1]
    assert "backend" not in identities[0]["components"]
    assert "loss" in identities[0]["components"]


def test_a_backend_is_still_a_component():
    found = {".".join(map(str, path)): choice.name for path, choice, _ in choices(node("ddp").config)}
    assert found == {"loss": "nll", "backend": "ddp"}


BEMA = {"name": "bema", "every": 10}
WATCHERS = ["completions", {"name": "tensorboard", "directory": "logs"}]


def test_callbacks_that_only_watch_are_no_part_of_a_key():
    with_them = node("single", callbacks=[WATCHERS[0], BEMA, WATCHERS[1], "divergence"]).config
    without = node("single", callbacks=[BEMA, "divergence"]).config
    assert semantic(with_them) == semantic(without)
    assert [each["name"] for each in semantic(without)["callbacks"]] == ["bema", "divergence"]
    first, second = (plugin_identities("train.sft", config, catalogue()) for config in (with_them, without))
    assert first == second
    assert {"callbacks.0", "callbacks.1"} <= second["components"].keys()
    assert semantic(without) != semantic(
        node("single", callbacks=[{**BEMA, "every": 20}, "divergence"]).config
    )
    assert len(list(choices(with_them))) == len(list(choices(with_them, volatile=False))) + 3, (
        "backend, two watchers"
    )


@pytest.mark.parametrize("name", ["wandb", "trackio", "tensorboard"])
def test_a_reporter_needs_its_library(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(requirements.importlib.util, "find_spec", lambda library, *_: None)
    (finding,) = shortfalls(node("single", callbacks=[name]), catalogue())
    assert finding.level is Level.ERROR
    assert finding.message == f"callbacks.0: `{name}` needs {name}, which is not installed"
    assert finding.fix == installing([name])


def test_what_callbacks_have_against_other_options_is_said():
    said_of = said(node("single", callbacks=["bema"], load_best_model_at_end=True, eval_steps=1))
    assert said_of == [
        "callbacks.0: load_best_model_at_end puts out other weights; set `put_out: beside`, or leave one out"
    ]
    merging = {"name": "merge_checkpoints", "every": 5}
    assert len(said(node("single", callbacks=[merging], load_best_model_at_end=True, eval_steps=1))) == 1
    assert said(node("single", callbacks=[merging, {"name": "bema", "after": 9}], max_steps=5)) == []


def test_a_callback_may_add_an_output():
    beside = node("single", callbacks=[{"name": "bema", "put_out": "beside"}])
    assert [port.name for port in beside.outputs()] == ["model", "average"]
    assert [port.name for port in node("single", callbacks=["bema"]).outputs()] == ["model"]


class _Scoring(StageConfig):
    reward: Annotated[Choice, Uses(Group.REWARD)]


class _Scorer(Stage):
    name = "scorer"
    version = 1
    config = _Scoring
    inputs = (Port("data", frozenset({Kind.DATASET})),)
    target = "nowhere:run"

    def outputs(self, config: Any) -> tuple[Port, ...]:
        return ()


class _Judged(_Scorer):
    inputs = (*_Scorer.inputs, Port("judge", frozenset({Kind.REWARD_MODEL}), optional=True))


@pytest.mark.parametrize("name", catalogue().names(Group.REWARD))
@pytest.mark.parametrize("stage", [_Scorer, _Judged])
def test_a_reward_that_judges_with_a_model_needs_a_port_for_it(stage: type[Stage], name: str):
    reward = catalogue().load(Group.REWARD, name)
    given: dict[str, Any] = {"stage": "rated", "uses": "acme/scorer", "inputs": {}, "needs": ()}
    config = configured(stage(), reward=name)
    machine = {"resources": Resources(), "runtime": Runtime()}
    messages = said(Node(name="rated", plugin=stage(), config=config, **given, **machine))
    kinds = reward.models if isinstance(reward, type) and issubclass(reward, ModelReward) else frozenset()
    taken = {kind for port in stage.inputs for kind in port.kinds}
    assert bool(messages) is bool(kinds and not kinds & taken)
    for message in messages:
        assert message.startswith(f"reward: reward `{name}` judges with a ")
        assert message.endswith("`acme/scorer` has no input port that takes one")
