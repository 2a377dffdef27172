"""The dataset formats: which columns they need, how a format is recognised, what makes a row unusable."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from posttrain.contracts.format import Column, Format, Row
from posttrain.errors import DataError
from posttrain_plugins.data.formats.alpaca import Alpaca
from posttrain_plugins.data.formats.implicit import FullPreference, HhRlhf, ImplicitPreference
from posttrain_plugins.data.formats.inference import NoFormat, infer, unfit
from posttrain_plugins.data.formats.language import Messages, Text
from posttrain_plugins.data.formats.nicknames import meant
from posttrain_plugins.data.formats.openai_chat import OpenAIChat, OpenAIPreference
from posttrain_plugins.data.formats.passages import passage_of
from posttrain_plugins.data.formats.preference import Preference, UnpairedPreference
from posttrain_plugins.data.formats.prompts import Prompt, PromptCompletion
from posttrain_plugins.data.formats.schema import Schema, schema_of
from posttrain_plugins.data.formats.scored import Ranked, Scored
from posttrain_plugins.data.formats.sharegpt import ShareGpt, ShareGptPreference
from posttrain_plugins.data.formats.stepwise import Stepwise
from posttrain_plugins.data.formats.three_way import ThreeWay
from posttrain_plugins.data.formats.ultrafeedback import UltraFeedback
from posttrain_plugins.data.formats.values import listed, type_name

__all__ = [
    "BUILT_IN",
    "CANONICAL",
    "FORMATS",
    "NoFormat",
    "Schema",
    "format_of",
    "infer_format",
    "listed",
    "meant",
    "passage_of",
    "required",
    "resolved",
    "row_problem",
    "schema_of",
    "type_name",
    "unfit_for",
]

BUILT_IN: Mapping[str, type[Format]] = {
    "text": Text,
    "messages": Messages,
    "prompt": Prompt,
    "prompt_completion": PromptCompletion,
    "preference": Preference,
    "unpaired_preference": UnpairedPreference,
    "three_way": ThreeWay,
    "scored": Scored,
    "ranked": Ranked,
    "stepwise": Stepwise,
    "implicit_preference": ImplicitPreference,
    "full_preference": FullPreference,
    "hh_rlhf": HhRlhf,
    "alpaca": Alpaca,
    "sharegpt": ShareGpt,
    "sharegpt_preference": ShareGptPreference,
    "openai_chat": OpenAIChat,
    "openai_preference": OpenAIPreference,
    "ultrafeedback": UltraFeedback,
}
"""The formats by name."""

CANONICAL: tuple[str, ...] = tuple(name for name, format in BUILT_IN.items() if format.becomes is None)
"""Those that datasets in the store have."""

FORMATS: Mapping[str, tuple[str, ...]] = {name: BUILT_IN[name].columns for name in CANONICAL}
"""Columns that each canonical format needs; other columns travel along."""

_INSTANCES: Mapping[str, Format] = {name: format() for name, format in BUILT_IN.items()}


def format_of(name: str) -> Format:
    """Return a built-in format.

    Raises:
        DataError: There is no such format.
    """
    if name not in _INSTANCES:
        raise DataError(
            f"unknown dataset format `{name}`",
            expected=f"one of {listed(BUILT_IN)}",
            fix=meant(name, tuple(BUILT_IN)),
        )
    return _INSTANCES[name]


def resolved(format: str | Format) -> Format:
    """Return a format that is given by its built-in name or as itself.

    Raises:
        DataError: There is no such format.
    """
    return format_of(format) if isinstance(format, str) else format


def required(format: str) -> tuple[str, ...]:
    """Return the columns of a format.

    Raises:
        DataError: There is no such format.
    """
    return format_of(format).columns


def row_problem(row: Row, format: str) -> str | None:
    """Say what makes a row unusable in its format, or return None."""
    return format_of(format).problem(row)


def infer_format(schema: Mapping[str, Column], where: str, told: str | None = None) -> str:
    """Recognise a built-in format from the columns of all rows.

    Raises:
        NoFormat: No format fits.
        DataError: Several do.
    """
    return infer(BUILT_IN, schema, where, told)


def unfit_for(formats: Collection[str], error: NoFormat) -> NoFormat | None:
    """Return an error about columns as it is for somebody who takes some formats only.

    Args:
        formats: The canonical ones that are taken.
        error: It speaks of all formats.

    Returns:
        None where no built-in format comes to one of them.
    """
    fitting = {name: each for name, each in BUILT_IN.items() if (each.becomes or name) in formats}
    return unfit(fitting, error.columns, error.where, error.found) if fitting else None
