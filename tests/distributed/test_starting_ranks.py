"""The starting policy comes back exactly on several ranks too, and each keeps its own share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers.ranks import in_own_process
from helpers.starting_work import looks

from posttrain.errors import StageError

pytestmark = pytest.mark.slow

BACKENDS: Mapping[str, Mapping[str, Any]] = {
    "ddp": {"name": "ddp"},
    "fsdp2": {"name": "fsdp2"},
    "zero2": {"name": "deepspeed", "stage": 2},
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_start_is_exact_on_two_ranks(tmp_path: Path, backend: str):
    found = in_own_process(looks, tmp_path, BACKENDS[backend], [None, "default", "pissa"])
    for init, told in found.items():
        assert told["start"] == [True] * 3 and told["back"] and told["moved"] > 1e-3, init
        share = told["trained"] if init != "default" else 0
        assert told["memory"] == (share // 2 if backend == "fsdp2" else share), init


def test_weights_that_deepspeed_partitions_are_refused(tmp_path: Path):
    with pytest.raises(StageError, match="cannot be kept"):
        in_own_process(looks, tmp_path, {"name": "deepspeed", "stage": 3}, [None])
