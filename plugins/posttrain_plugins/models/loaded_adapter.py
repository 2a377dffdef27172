"""Adapters that `model.load` brings in: which base they belong to, and what of them is copied."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from posttrain.artifacts.kinds import Kind
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.stage import Inputs, StageContext
from posttrain.errors import DataError, StoreError
from posttrain_plugins.models.artifact import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CONFIG,
    QUANTIZATION,
    write_config,
)
from posttrain_plugins.models.recognition import base_digest, is_adapter, unknown_base
from posttrain_plugins.models.valued_record import VALUES
from posttrain_plugins.templates.tokenizer import TOKENIZER, read_json

BASE = "base"
"""What the port of an adapter's base is called."""


def known_base(directory: Path, inputs: Inputs) -> str | None:
    """Return the digest of an adapter's base as far as it is known: what is connected, or what is recorded."""
    given = inputs.get(BASE, ())
    if given:
        return None if given[0].artifact is None else given[0].artifact.digest
    return base_digest(directory)


def require_fitting(directory: Path, inputs: Inputs, kind: Kind, dtype: str | None) -> None:
    """Refuse options and a base that do not suit what a directory holds.

    Raises:
        DataError: They do not.
    """
    given, known = inputs.get(BASE, ()), known_base(directory, inputs)
    if dtype is not None and kind is not Kind.MODEL:
        raise DataError(
            f"`dtype` changes the weights of a policy alone, and {directory} holds a `{kind}`",
            fix="leave `dtype` out: the trainers compute in their own precision",
        )
    if not is_adapter(directory):
        if given:
            raise DataError(
                f"{directory} holds a whole model, and no adapter on {given[0].origin}",
                fix=f"leave the input `{BASE}` out",
            )
        return
    if known is None and not given:
        raise unknown_base(directory)
    recorded = base_digest(directory)
    if known is not None and recorded is not None and known != recorded:
        raise DataError(
            "the adapter was trained on another base than is connected",
            where=str(directory / ADAPTER_CONFIG),
            found=recorded[:12],
            expected=known[:12],
            fix=f"connect its own base, or leave the input `{BASE}` out",
        )


def base_of(source: Path, given: Sequence[Artifact], context: StageContext) -> Artifact:
    """Return the base of an adapter: what is connected, or what is recorded and in the store.

    Raises:
        DataError: There is none.
    """
    if given:
        return given[0]
    digest = base_digest(source)
    if digest is None:
        raise unknown_base(source)
    try:
        return context.artifact(digest)
    except StoreError as error:
        raise unknown_base(source) from error


def copy_adapter(source: Path, directory: Path, base: Artifact) -> None:
    """Copy an adapter, say which model it belongs to, and take from that what the adapter's directory lacks."""
    from posttrain_plugins.models.policy import copy_companions

    copy_beside(source, directory, ADAPTER_WEIGHTS, QUANTIZATION, VALUES)
    options = {**read_json(source / ADAPTER_CONFIG), "base_model_name_or_path": base.digest, "revision": None}
    write_config(directory / ADAPTER_CONFIG, options)
    write_config(directory / CONFIG, read_json(source / CONFIG) or read_json(base.path / CONFIG))
    copy_companions(source if (source / TOKENIZER).is_file() else base.path, directory)


def copy_beside(source: Path, directory: Path, *names: str) -> None:
    """Copy files of a directory, as far as they are there."""
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)
