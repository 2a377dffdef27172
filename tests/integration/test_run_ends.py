"""How a whole run ends with the default runner: completed, failed and resumed, rejected. All records agree."""

from __future__ import annotations

import base64
import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.products import NODES, TINY, Product, Tracked, processes_in

from posttrain_pipelines.flow.server import token

pytestmark = [
    pytest.mark.slow,
    pytest.mark.prefect,
    pytest.mark.mlflow,
    pytest.mark.xdist_group("run ends"),
]

FUSSY = """\
import pathlib

import posttrain

POSTTRAIN_API = ">=1,<2"


def fussy(samples, config):
    if not pathlib.Path("dictionary.txt").exists():
        raise LookupError("there is no dictionary.txt")
    return [float(len(sample.completion)) for sample in samples]


@posttrain.hookimpl
def posttrain_rewards():
    return [posttrain.Registration("fussy", "Needs a file beside the pipeline.", fussy)]
"""

STRICT = ("--set", "stages.gate.with.min_improvement=0.9", "--set", "stages.promote.with.name=strict")


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    """One workspace, so that Prefect's server starts once; every test makes nodes of its own."""
    made = Product.tiny(tmp_path_factory.mktemp("ends"))
    yield made
    assert made("down").code == 0
    assert list(processes_in(made.base, server=True)) == []


def run(product: Product, *arguments: str, pipeline: str = "tiny.yaml") -> Any:
    """Run with the runner that is the default where Prefect is installed."""
    return product("run", pipeline, *arguments)


def flow_state(product: Product) -> tuple[str, str]:
    """Return type and name of the newest flow run's state."""
    service = json.loads((product.workspace / "services" / "prefect.json").read_text())
    body = {"flow_runs": {"name": {"any_": [product.runs[-1].run]}}, "sort": "EXPECTED_START_TIME_DESC"}
    login = base64.b64encode(token(product.workspace).encode()).decode()
    headers = {"content-type": "application/json", "authorization": f"Basic {login}"}
    request = urllib.request.Request(service["url"] + "/flow_runs/filter", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        newest = json.loads(answer.read())[0]
    return newest["state_type"], newest["state_name"]


def statuses(product: Product) -> dict[str, str]:
    return {name: node["status"] for name, node in product.nodes().items()}


def test_everything_agrees_that_a_run_completed(product: Product) -> None:
    done = run(product)
    assert done.code == 0, done.text
    assert flow_state(product) == ("COMPLETED", "Completed")
    assert product.status()["runner"] == "prefect"
    assert statuses(product) == dict.fromkeys(NODES, "completed")
    assert {state for [(_, state)] in Tracked(product.workspace).runs(product.runs[-1].run).values()} == {
        "FINISHED"
    }
    assert product.notes() == []


def test_a_failed_stage_fails_the_run_everywhere_and_a_resume_goes_on_in_the_same_records(
    product: Product,
) -> None:
    product.write("fussy.py", FUSSY)
    text = TINY.replace("reward: exact", "reward: fussy").replace("rows: 200", "rows: 180")
    product.write("fussy.yaml", f"plugins: [./fussy.py]\n{text}")
    tracked = Tracked(product.workspace)

    failed = run(product, pipeline="fussy.yaml")
    assert failed.code == 1
    assert "LookupError: there is no dictionary.txt" in failed.out
    assert "fussy.py:10" in failed.out
    assert f"posttrain resume {product.runs[-1].run}" in failed.out
    assert flow_state(product) == ("FAILED", "Failed")
    before = statuses(product)
    assert before == {
        **dict.fromkeys(("task", "base", "sft"), "completed"),
        "pairs": "failed",
        **dict.fromkeys(("dpo", "eval", "gate", "promote"), "skipped"),
    }
    first = tracked.runs(product.runs[-1].run)
    assert {node: state for node, [(_, state)] in first.items()} == {
        "": "FAILED", "task": "FINISHED", "base": "FINISHED", "sft": "FINISHED", "pairs": "FAILED",
    }  # fmt: skip
    made = product.digests()

    product.write("dictionary.txt", "")
    resumed = product("resume")
    assert resumed.code == 0, resumed.text
    assert flow_state(product) == ("COMPLETED", "Completed")
    assert [len(product.entries(kind)) for kind in ("run-started", "run-ended")] == [2, 2]
    assert statuses(product) == {
        name: "cached" if name in ("task", "base", "sft") else "completed" for name in NODES
    }
    assert {name: product.digests()[name] for name in ("task", "base", "sft")} == {
        name: made[name] for name in ("task", "base", "sft")
    }
    second = tracked.runs(product.runs[-1].run)
    assert {state for [(_, state)] in second.values()} == {"FINISHED"}
    assert {node: second[node] for node in ("task", "base", "sft")} == {
        node: first[node] for node in ("task", "base", "sft")
    }
    assert [second[node][0][0] for node in ("", "pairs")] == [first[node][0][0] for node in ("", "pairs")]
    assert tracked.repeated() == []


def test_a_gates_no_is_no_failure_and_promotes_nothing(product: Product) -> None:
    done = run(product, *STRICT)
    assert done.code == 3, done.text
    assert flow_state(product) == ("COMPLETED", "Rejected")
    assert {name: statuses(product)[name] for name in ("gate", "promote")} == {
        "gate": "rejected", "promote": "skipped",
    }  # fmt: skip
    assert "strict" not in {model["name"] for model in product("status", "--json").json()["models"]}
    tracked = Tracked(product.workspace)
    found = tracked.runs(product.runs[-1].run)
    assert "promote" not in found
    assert {state for [(_, state)] in found.values()} == {"FINISHED"}
    for node in ("", "gate"):
        assert tracked.tags(found[node][0][0])["posttrain.verdict"] == "rejected"
    runs = len(product.runs)
    again = run(product, *STRICT)
    assert (again.code, len(product.runs)) == (3, runs), again.text
    assert "nothing to do" in again.out
