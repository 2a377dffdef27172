"""Stages that write rows share what they tell of them, and have its numerics in their keys."""

from __future__ import annotations

import importlib
import inspect

import pytest
from helpers.contexts import catalogue

from posttrain_plugins.data.rows import SHARED

WRITERS = ("write_rows(", "write_derived(", "RowWriter(")
STAGES = [name for name in catalogue().stages() if name.startswith("data.")]


@pytest.mark.parametrize("name", STAGES)
def test_whoever_writes_rows_has_the_numerics_of_their_facts_in_its_key(name: str) -> None:
    stage = catalogue().stage(name)
    source = inspect.getsource(importlib.import_module(stage.target.partition(":")[0]))
    writes = any(writer in source for writer in WRITERS)
    assert (stage.shared == SHARED) is writes
