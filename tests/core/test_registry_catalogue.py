"""The contracts that a loaded plugin is checked against."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.contracts_kept import (
    GoodLoss,
    GoodReward,
    GoodStage,
    GoodTrainer,
    variant,
)
from helpers.plugins import catalogue_of
from pydantic import ConfigDict, Field

from posttrain.artifacts.kinds import Kind
from posttrain.contracts.component import Config
from posttrain.contracts.loss import Family, Loss, Need, Scope
from posttrain.contracts.registration import Group, Registration
from posttrain.contracts.rule import Rule
from posttrain.contracts.stage import Level, Port, Stage
from posttrain.contracts.trainer import Trainer
from posttrain.errors import PluginError


class GoodGenerator:
    format = "prompt"
    columns = ("prompt",)

    def __call__(self, config: Any, rows: int, seed: int) -> Any:
        return iter(())


class GoodRule(Rule):
    """Nothing goes wrong."""

    code = "ACME01"
    title = "nothing"
    level = Level.NOTE
    fix = "nothing"

    def check(self, site: Any) -> Any:
        return ()


class GoodRunner:
    def run(self, execution: Any) -> Any:
        return {}


class GoodTracker:
    def sync(self, workspace: Path, run: str) -> None: ...

    def behind(self, workspace: Path, run: str) -> bool:
        return False


def good_command() -> None: ...


GOOD = {
    "stages": (Group.STAGE, GoodStage),
    "trainers": (Group.TRAINER, GoodTrainer),
    "losses": (Group.LOSS, GoodLoss),
    "rewards": (Group.REWARD, GoodReward),
    "generators": (Group.GENERATOR, GoodGenerator),
    "rules": (Group.RULE, GoodRule),
    "runners": (Group.RUNNER, GoodRunner),
    "trackers": (Group.TRACKER, GoodTracker),
    "commands": (Group.COMMAND, good_command),
}


class Lax(Config):
    model_config = ConfigDict(extra="ignore")


class Aliased(Config):
    lam: float = Field(default=1.0, alias="lambda")


class Named(Config):
    name: str = ""


class NoOutputs(Stage):
    target = "a:b"


class Abstract(Trainer):
    target = "a:b"
    family = Family.TOKEN
    formats = frozenset({"messages"})

    def outputs(self, config: Any) -> tuple[Port, ...]:
        return ()


def needs_argument(self: Any, argument: int) -> None: ...


TWICE = (Port("model", frozenset({Kind.MODEL})), Port("model", frozenset({Kind.ADAPTER})))

BAD: list[tuple[str, Any, str]] = [
    ("stages", GoodLoss, "must be a subclass of posttrain.Stage"),
    ("stages", GoodStage(), "must be a subclass of posttrain.Stage"),
    ("stages", type("Shares", (GoodStage,), {"shared": {"loop": "1"}}), "`shared` must map names"),
    ("stages", NoOutputs, "does not define outputs"),
    ("stages", variant(GoodStage, target=None), "`target` must be 'module:function', but is None"),
    (
        "stages",
        variant(GoodStage, target="module.run"),
        "`target` must be 'module:function', but is 'module.run'",
    ),
    ("stages", variant(GoodStage, config=Config), "`config` must be a subclass of posttrain.StageConfig"),
    ("stages", variant(GoodStage, inputs=TWICE), "the input port 'model' is declared 2 times"),
    ("stages", variant(GoodStage, inputs=["model"]), "`inputs` must be a tuple of posttrain.Port"),
    ("stages", variant(GoodStage, tiny={"sise": 1}), "`tiny` sets 'sise', which is no option"),
    ("stages", variant(GoodStage, __init__=needs_argument), "the constructor must take ()"),
    (
        "stages",
        variant(GoodStage, estimate=lambda self, config, inputs: None),
        "estimate must take (config, inputs, gpus)",
    ),
    ("trainers", GoodStage, "must be a subclass of posttrain.Trainer"),
    ("trainers", Abstract, "does not define batch"),
    ("trainers", variant(GoodTrainer, family="token"), "`family` must be a posttrain.Family"),
    ("trainers", variant(GoodTrainer, formats={"messages"}), "`formats` must be a frozenset"),
    ("losses", variant(GoodLoss, family=None), "`family` must be a posttrain.Family"),
    (
        "losses",
        variant(GoodLoss, __call__=lambda self, batch: None),
        "__call__ must take (batch, config, stats, state)",
    ),
    ("losses", type("Bare", (), {"family": Family.TOKEN}), "must be a subclass of posttrain.Loss"),
    ("losses", type("Silent", (Loss,), {"family": Family.TOKEN}), "it defines no __call__(batch"),
    ("losses", variant(GoodLoss, measure=lambda self, batch: {}), "measure must take (batch, config, state)"),
    ("losses", variant(GoodLoss, begin=lambda self: {}), "begin must take (config)"),
    ("losses", variant(GoodLoss, advance=lambda self, state: {}), "advance must take (state, stats, config)"),
    ("losses", variant(GoodLoss, needs={"reference"}), "`needs` must be a frozenset of posttrain.Need"),
    (
        "losses",
        variant(GoodLoss, family=Family.TOKEN, needs=frozenset({Need.REFERENCE})),
        "it needs `reference`, which no batch of the family token holds",
    ),
    (
        "losses",
        variant(GoodLoss, family=Family.PREFERENCE, needs=frozenset({Need.MISMATCHED})),
        "it needs `mismatched`, which no batch of the family preference holds",
    ),
    (
        "losses",
        variant(GoodLoss, family=Family.UNPAIRED, needs=frozenset({Need.MISMATCHED}), scope=Scope.STEP),
        "it sees the whole step and needs `mismatched` answers",
    ),
    ("losses", variant(GoodLoss, scope="step"), "`scope` must be a posttrain.Scope"),
    ("losses", variant(GoodLoss, config=dict), "`config` must be a subclass of posttrain.Config"),
    ("losses", variant(GoodLoss, config=Lax), "must keep extra='forbid' and frozen=True"),
    ("losses", variant(GoodLoss, config=Aliased), "the option 'lam' has an alias"),
    ("losses", variant(GoodLoss, config=Named), "an option cannot be called 'name'"),
    ("rewards", object, "must be callable with (samples, config), but defines no __call__"),
    ("rewards", lambda samples: [], "it must take (samples, config)"),
    ("rewards", 3, "it is not callable"),
    ("generators", variant(GoodGenerator, columns=None), "`columns` must be a tuple of column names"),
    ("generators", variant(GoodGenerator, format=None), "`format` must be a dataset format"),
    (
        "generators",
        variant(GoodGenerator, __call__=lambda self, config: ()),
        "must take (config, rows, seed)",
    ),
    ("rules", GoodRule(), "must be a subclass of posttrain.Rule"),
    ("rules", GoodLoss, "must be a subclass of posttrain.Rule"),
    ("rules", variant(GoodRule, code="acme-1"), "`code` must be letters and a number"),
    ("rules", variant(GoodRule, code=None), "`code` must be letters and a number"),
    ("rules", variant(GoodRule, title=""), "`title` must be one line of text"),
    ("rules", variant(GoodRule, fix="a\nb"), "`fix` must be one line of text"),
    ("rules", variant(GoodRule, level="error"), "`level` must be a posttrain.Level"),
    ("rules", variant(GoodRule, __doc__=None), "no docstring"),
    ("rules", variant(GoodRule, check=lambda self: ()), "check must take (site)"),
    ("runners", GoodRule, "run is missing"),
    ("trackers", variant(GoodTracker, behind=None), "behind is missing"),
    ("commands", "os:sep", "must be a function, but is '/'"),
]


@pytest.mark.parametrize("hook", GOOD)
def test_what_keeps_its_contract_loads(hook: str) -> None:
    group, target = GOOD[hook]
    assert catalogue_of(**{hook: [Registration("it", "s", target)]}).load(group, "it") is target


@pytest.mark.parametrize(("hook", "target", "message"), BAD)
def test_what_breaks_its_contract_is_refused(hook: str, target: Any, message: str) -> None:
    group, good = GOOD[hook]
    catalogue = catalogue_of(**{hook: [Registration("bad", "s", target), Registration("good", "s", good)]})
    with pytest.raises(PluginError) as error:
        catalogue.load(group, "bad")
    assert f"the {group} 'bad' of memory breaks the contract of a {group}: " in str(error.value)
    assert message in error.value.message
    assert catalogue.load(group, "good") is good
