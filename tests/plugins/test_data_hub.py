"""Whether the hub libraries may use the network, whatever the process was started with."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

CODE = """
import os
{imports}
from posttrain_plugins.hub import _network
with _network({allowed}):
    from huggingface_hub import constants, is_offline_mode
    import datasets.config
    from transformers.utils.hub import is_offline_mode as asked
    inside = [constants.HF_HUB_OFFLINE, is_offline_mode(), asked(), datasets.config.HF_HUB_OFFLINE]
    inside.append(os.environ["HF_HUB_OFFLINE"] == "1")
print(inside, constants.HF_HUB_OFFLINE, os.environ.get("HF_HUB_OFFLINE"), os.environ.get("HF_DATASETS_OFFLINE"))
"""


@pytest.mark.parametrize("imports", ["", "import huggingface_hub.constants, datasets.config"])
@pytest.mark.parametrize(("allowed", "variable"), [(True, "1"), (False, "0")])
def test_the_network_is_switched_both_ways_and_back(imports: str, allowed: bool, variable: str) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": variable}
    environment.pop("HF_DATASETS_OFFLINE", None)
    code = CODE.format(imports=imports, allowed=allowed)
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert run.stdout.strip() == f"{[not allowed] * 5} {variable == '1'} {variable} None"
