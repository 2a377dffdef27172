"""posttrain: pipelines for the alignment of language models.

The public API for plugin authors and for pipelines built in Python. Importing it loads nothing heavy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "API_VERSION": "posttrain.registry.hooks",
    "hookimpl": "posttrain.registry.hooks",
    "Group": "posttrain.contracts.registration",
    "Registration": "posttrain.contracts.registration",
    "Backend": "posttrain.contracts.backend",
    "Parallel": "posttrain.contracts.backend",
    "Place": "posttrain.contracts.backend",
    "Ranks": "posttrain.contracts.backend",
    "Split": "posttrain.contracts.backend",
    "Callback": "posttrain.contracts.callback",
    "Training": "posttrain.contracts.callback",
    "Choice": "posttrain.contracts.component",
    "Component": "posttrain.contracts.component",
    "Config": "posttrain.contracts.component",
    "NoOptions": "posttrain.contracts.component",
    "Uses": "posttrain.contracts.component",
    "Certainty": "posttrain.contracts.stage",
    "Finding": "posttrain.contracts.stage",
    "Level": "posttrain.contracts.stage",
    "Outcome": "posttrain.contracts.stage",
    "Port": "posttrain.contracts.stage",
    "Prediction": "posttrain.contracts.stage",
    "Stage": "posttrain.contracts.stage",
    "StageConfig": "posttrain.contracts.stage",
    "StageContext": "posttrain.contracts.stage",
    "Verdict": "posttrain.contracts.stage",
    "Judge": "posttrain.contracts.trainer",
    "StepEnds": "posttrain.contracts.trainer",
    "Supervise": "posttrain.contracts.trainer",
    "Trainer": "posttrain.contracts.trainer",
    "Family": "posttrain.contracts.loss",
    "Loss": "posttrain.contracts.loss",
    "LossOutput": "posttrain.contracts.loss",
    "PreferenceBatch": "posttrain.contracts.loss",
    "Need": "posttrain.contracts.loss",
    "AnswerTokens": "posttrain.contracts.loss",
    "ThreeWayBatch": "posttrain.contracts.loss",
    "UnpairedBatch": "posttrain.contracts.loss",
    "RewardBatch": "posttrain.contracts.loss",
    "ProcessRewardBatch": "posttrain.contracts.loss",
    "Scope": "posttrain.contracts.loss",
    "Term": "posttrain.contracts.loss",
    "TokenBatch": "posttrain.contracts.loss",
    "EXAMPLE_MEAN": "posttrain.contracts.reduction",
    "MEAN_OF_SEQUENCE_MEANS": "posttrain.contracts.reduction",
    "SEQUENCE_MEAN": "posttrain.contracts.reduction",
    "TOKEN_MEAN": "posttrain.contracts.reduction",
    "Constant": "posttrain.contracts.reduction",
    "RoleTokenMean": "posttrain.contracts.reduction",
    "Reduction": "posttrain.contracts.reduction",
    "reduction": "posttrain.contracts.reduction",
    "Column": "posttrain.contracts.format",
    "Format": "posttrain.contracts.format",
    "Passage": "posttrain.contracts.passage",
    "Generator": "posttrain.contracts.generator",
    "ModelReward": "posttrain.contracts.reward",
    "Reward": "posttrain.contracts.reward",
    "Sample": "posttrain.contracts.reward",
    "Rule": "posttrain.contracts.rule",
    "Site": "posttrain.contracts.rule",
    "Kind": "posttrain.artifacts.kinds",
    "Pipeline": "posttrain.pipeline",
    "PosttrainError": "posttrain.errors",
}

__all__ = ["__version__", *sorted(_WHERE)]

if TYPE_CHECKING:
    from posttrain.artifacts.kinds import Kind as Kind
    from posttrain.contracts.backend import Backend as Backend
    from posttrain.contracts.backend import Parallel as Parallel
    from posttrain.contracts.backend import Place as Place
    from posttrain.contracts.backend import Ranks as Ranks
    from posttrain.contracts.backend import Split as Split
    from posttrain.contracts.callback import Callback as Callback
    from posttrain.contracts.callback import Training as Training
    from posttrain.contracts.component import Choice as Choice
    from posttrain.contracts.component import Component as Component
    from posttrain.contracts.component import Config as Config
    from posttrain.contracts.component import NoOptions as NoOptions
    from posttrain.contracts.component import Uses as Uses
    from posttrain.contracts.format import Column as Column
    from posttrain.contracts.format import Format as Format
    from posttrain.contracts.generator import Generator as Generator
    from posttrain.contracts.loss import AnswerTokens as AnswerTokens
    from posttrain.contracts.loss import Family as Family
    from posttrain.contracts.loss import Loss as Loss
    from posttrain.contracts.loss import LossOutput as LossOutput
    from posttrain.contracts.loss import Need as Need
    from posttrain.contracts.loss import PreferenceBatch as PreferenceBatch
    from posttrain.contracts.loss import ProcessRewardBatch as ProcessRewardBatch
    from posttrain.contracts.loss import RewardBatch as RewardBatch
    from posttrain.contracts.loss import Scope as Scope
    from posttrain.contracts.loss import Term as Term
    from posttrain.contracts.loss import ThreeWayBatch as ThreeWayBatch
    from posttrain.contracts.loss import TokenBatch as TokenBatch
    from posttrain.contracts.loss import UnpairedBatch as UnpairedBatch
    from posttrain.contracts.passage import Passage as Passage
    from posttrain.contracts.reduction import EXAMPLE_MEAN as EXAMPLE_MEAN
    from posttrain.contracts.reduction import MEAN_OF_SEQUENCE_MEANS as MEAN_OF_SEQUENCE_MEANS
    from posttrain.contracts.reduction import SEQUENCE_MEAN as SEQUENCE_MEAN
    from posttrain.contracts.reduction import TOKEN_MEAN as TOKEN_MEAN
    from posttrain.contracts.reduction import Constant as Constant
    from posttrain.contracts.reduction import Reduction as Reduction
    from posttrain.contracts.reduction import RoleTokenMean as RoleTokenMean
    from posttrain.contracts.reduction import reduction as reduction
    from posttrain.contracts.registration import Group as Group
    from posttrain.contracts.registration import Registration as Registration
    from posttrain.contracts.reward import ModelReward as ModelReward
    from posttrain.contracts.reward import Reward as Reward
    from posttrain.contracts.reward import Sample as Sample
    from posttrain.contracts.rule import Rule as Rule
    from posttrain.contracts.rule import Site as Site
    from posttrain.contracts.stage import Certainty as Certainty
    from posttrain.contracts.stage import Finding as Finding
    from posttrain.contracts.stage import Level as Level
    from posttrain.contracts.stage import Outcome as Outcome
    from posttrain.contracts.stage import Port as Port
    from posttrain.contracts.stage import Prediction as Prediction
    from posttrain.contracts.stage import Stage as Stage
    from posttrain.contracts.stage import StageConfig as StageConfig
    from posttrain.contracts.stage import StageContext as StageContext
    from posttrain.contracts.stage import Verdict as Verdict
    from posttrain.contracts.trainer import Judge as Judge
    from posttrain.contracts.trainer import StepEnds as StepEnds
    from posttrain.contracts.trainer import Supervise as Supervise
    from posttrain.contracts.trainer import Trainer as Trainer
    from posttrain.errors import PosttrainError as PosttrainError
    from posttrain.pipeline import Pipeline as Pipeline
    from posttrain.registry.hooks import API_VERSION as API_VERSION
    from posttrain.registry.hooks import hookimpl as hookimpl


def __getattr__(name: str) -> Any:
    module = _WHERE.get(name)
    if module is None:
        raise AttributeError(f"module 'posttrain' has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)
