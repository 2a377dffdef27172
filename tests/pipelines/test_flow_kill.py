"""The default runner, killed: nothing but its server is left, and a resume completes."""

from __future__ import annotations

import base64
import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.products import Product, processes_in

from posttrain_pipelines.flow.server import token
from posttrain_pipelines.services import recorded, stop

pytestmark = [pytest.mark.prefect, pytest.mark.slow]

STAGES = Path(__file__).parents[1] / "helpers" / "fake_stages.py"
PIPELINE = """\
name: fake
plugins: [{stages}]
stages:
  first: {{uses: test/write}}
  second: {{uses: test/slow, inputs: {{data: first}}, with: {{steps: 10, pause: {pause}, marker: {marker}}}}}
"""


@pytest.fixture
def product(tmp_path: Path) -> Iterator[Product]:
    product = Product(tmp_path, env={"MLFLOW_TRACKING_URI": "http://127.0.0.1:9"})
    yield product
    stop(product.workspace)


def flow_states(workspace: Path, run: str) -> list[str]:
    login = base64.b64encode(token(workspace).encode()).decode()
    request = urllib.request.Request(
        recorded(workspace)["prefect"].url + "/flow_runs/filter",
        json.dumps({"flow_runs": {"name": {"any_": [run]}}}).encode(),
        {"content-type": "application/json", "authorization": f"Basic {login}"},
    )
    with urllib.request.urlopen(request) as answer:
        found: list[dict[str, Any]] = json.loads(answer.read())
    return sorted(flow["state_type"] for flow in found)


def test_a_killed_run_leaves_nothing_behind_and_is_resumed(product: Product) -> None:
    marker = product.base / "marker"
    product.write("fake.yaml", PIPELINE.format(stages=STAGES, pause=1.0, marker=marker))
    process = product.start("run", "fake.yaml", "--runner", "prefect", "--quiet")
    deadline = time.monotonic() + 240
    while not marker.exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)
    process.kill()
    process.communicate(timeout=60)
    while list(processes_in(product.base)):
        assert time.monotonic() < deadline, [found.cmdline() for found in processes_in(product.base)]
        time.sleep(0.05)
    assert recorded(product.workspace)["prefect"].alive
    run = product.runs[-1].run
    assert flow_states(product.workspace, run) == ["RUNNING"]

    resumed = product("resume", "--runner", "prefect", "--quiet")
    assert resumed.code == 0, resumed.text
    assert flow_states(product.workspace, run) == ["COMPLETED", "CRASHED"]
    # the tracking server does not exist: that costs a note, not minutes and not the run
    (note,) = [note for note in product.notes() if note.startswith("mlflow does not have this run")]
    assert "MLflow did not answer" in note
