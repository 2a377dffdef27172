"""Whatever dies and whenever: a resumed run ends with the bytes of one that nothing happened to."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from helpers.kills import Moment, Reference, disturbed
from helpers.products import Product, Tracked, processes_in, steps_of

pytestmark = [pytest.mark.slow, pytest.mark.mlflow]

LONG = ("--set", "stages.sft.with.max_steps=400", "--set", "stages.sft.with.save_steps=50")
ONLY_SFT = ("--only", "sft", *LONG)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference.of(Product.tiny(tmp_path_factory.mktemp("reference")))


@pytest.mark.xdist_group("killed")
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_killed_at_a_random_moment(seed: int, reference: Reference, tmp_path: Path) -> None:
    story = disturbed(Product.tiny(tmp_path), Moment.drawn(seed), reference)
    assert story.problems == []
    assert story.equal, story
    assert story.resumes <= 1


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    product = Product.tiny(tmp_path_factory.mktemp("undisturbed"))
    done = product.run(*ONLY_SFT)
    assert done.code == 0, done.text
    return product.digests()


@pytest.mark.xdist_group("stopped")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_while_training_keeps_a_checkpoint_that_a_resume_goes_on_from(
    number: signal.Signals, undisturbed: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    product = Product.tiny(tmp_path)
    process = product.start("run", "tiny.yaml", "--runner", "sequential", *ONLY_SFT)
    deadline = time.monotonic() + 120
    while not list(product.workspace.glob("work/*/checkpoints/step-*")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, number)  # as a terminal does: to the job, which the workers are no part of
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, out + err
    assert "Traceback" not in out + err
    assert f"posttrain resume {product.runs[-1].run}" in out
    assert product.nodes()["sft"]["status"] == "interrupted"
    assert list(processes_in(tmp_path)) == []
    done = steps_of(product.events("sft"))[-1]
    assert 50 <= done < 400
    assert list(product.workspace.glob(f"work/*/checkpoints/step-{done:08d}"))

    tracked, run = Tracked(product.workspace), product.runs[-1].run
    stopped = tracked.runs(run)
    assert {node: state for node, [(_, state)] in stopped.items()} == {
        "": "KILLED", "task": "FINISHED", "base": "FINISHED", "sft": "KILLED",
    }  # fmt: skip

    resumed = product("resume")
    assert resumed.code == 0, resumed.text
    assert f"going on from step {done} of 400" in resumed.out
    assert steps_of(product.events("sft", 2)) == list(range(done + 1, 401))
    assert product.digests() == undisturbed
    finished = tracked.runs(run)
    assert {state for [(_, state)] in finished.values()} == {"FINISHED"}
    assert {node: found[0][0] for node, found in finished.items()} == {
        node: found[0][0] for node, found in stopped.items()
    }
    assert tracked.metrics(finished["sft"][0][0])["loss"] == list(range(1, 401))


def test_killed_while_mlflow_makes_its_database(tmp_path: Path) -> None:
    product = Product.tiny(tmp_path)
    process = product.start("run", "tiny.yaml", "--runner", "sequential", "--only", "base")
    deadline = time.monotonic() + 120
    while not any(path.stat().st_size for path in product.workspace.glob(".mlflow.db.new/first.db")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    process.kill()
    process.communicate()
    product("resume")  # the stages may have been done already; only the record of them was cut off
    synced = product("sync")
    assert synced.code == 0, synced.text
    tracked = Tracked(product.workspace)
    assert set(tracked.runs(product.runs[-1].run)) == {"", "task", "base"}
    assert tracked.repeated() == []
    assert not list(product.workspace.glob(".mlflow*"))
