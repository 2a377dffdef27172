"""What a process does for a stage before it runs."""

from __future__ import annotations

import gc

import pytest

from posttrain.execution.machine import uncollected


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_left_alone_within_the_block_alone(enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(ImportError), uncollected():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
