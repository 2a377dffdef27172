"""What steps are tried with: every trainer with every loss, every layout."""

from __future__ import annotations

import pytest
from helpers.stepping import (
    ALL,
)

from posttrain_plugins.training.layouts import LAYOUTS

EVERY_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)

EVERY_TRAINING = pytest.mark.parametrize(("uses", "loss"), ALL)
