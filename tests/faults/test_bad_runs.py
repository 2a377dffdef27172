"""What goes wrong while a pipeline runs: one clear error, nothing lost, and a way on."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest
from helpers.products import NODES, TINY, Done, Product, processes_in, steps_of

pytestmark = pytest.mark.slow

BARE = TINY.partition("  promote:")[0]
"""Without what comes with the tracker."""
LONG = BARE.replace("max_steps: 6,", "max_steps: 400,").replace("save_steps: 2", "save_steps: 20")

FILLED = """\
set -u
mkdir -p .posttrain
mount -t tmpfs -o size={size} tmpfs .posttrain
"$0" run tiny.yaml --runner sequential --quiet > full.out 2> full.err; echo $? > full.code
"$0" status > status.out 2> status.err; echo $? > status.code
"$0" store verify --full > verify.out 2> verify.err; echo $? > verify.code
mount -o remount,size=200m .posttrain
case "$(cat full.out full.err)" in
  *"posttrain resume"*) "$0" resume --quiet > again.out 2> again.err; echo $? > again.code;;
  *) "$0" run tiny.yaml --runner sequential --quiet > again.out 2> again.err; echo $? > again.code;;
esac
"$0" store verify --full > after.out 2> after.err; echo $? > after.code
"""

SEALED = """\
set -u
mount --bind .posttrain .posttrain
mount -o remount,ro,bind .posttrain
"$0" {arguments} > sealed.out 2> sealed.err; echo $? > sealed.code
"""


def untracked(base: Path, pipeline: str = BARE) -> Product:
    """A directory whose runs MLflow does not hear of, which is most of what a small run takes."""
    product = Product(base, env={"POSTTRAIN_DISABLE_PLUGINS": "flows"})
    product.write("tiny.yaml", pipeline)
    return product


def own_mounts(product: Product, script: str) -> None:
    """Run a shell script that may mount file systems nobody else sees; `$0` is the command."""
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    try:
        subprocess.run([*command, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this machine does not let its users mount file systems of their own")
    Product(product.base, wrapper=(*command, script))("ignored")


def done(product: Product, name: str) -> Done:
    """How a command of a script ended."""
    code, out, err = ((product.base / f"{name}.{part}").read_text() for part in ("code", "out", "err"))
    return Done(int(code), out, err)


def statuses(product: Product) -> dict[str, str]:
    return {name: node["status"] for name, node in product.nodes().items()}


def test_a_loss_that_is_not_finite_stops_and_names_the_step(tmp_path: Path) -> None:
    product = untracked(tmp_path)
    only = ("--only", "sft")
    diverged = product.run(*only, "--set", "stages.sft.with.learning_rate=1e30")
    assert diverged.code == 1
    assert "Traceback" not in diverged.text
    assert "is not finite" in diverged.out
    assert "lower learning_rate" in diverged.out
    failure = product.nodes()["sft"]["end"]["error"]
    assert failure["type"] == "TrainingDiverged"
    assert failure["where"] in ("step 2", "after step 2")
    assert product.digests().keys() >= {"task", "base"}
    kept = product.digests()["base"]
    mended = product.run(*only)
    assert mended.code == 0, mended.text
    assert statuses(product) == {"task": "cached", "base": "cached", "sft": "completed"}
    assert product.digests()["base"] == kept


def test_answers_that_truncation_removes_are_counted_and_named(tmp_path: Path) -> None:
    product = untracked(tmp_path)
    some = product.run("--only", "sft", "--set", "stages.sft.with.max_length=22")
    assert some.code == 0, some.text
    notes = [event["message"] for event in product.events("sft") if event["type"] == "note"]
    figures = product.nodes()["sft"]["end"]["figures"]
    dropped = int(figures["rows_dropped"])
    assert notes[0].startswith(
        f"{dropped} row(s) dropped: truncation to 22 tokens removes every supervised token (rows "
    )
    assert notes[0] in some.out
    assert (
        dropped > 0 and dropped + figures["rows"] == product.nodes()["task"]["end"]["figures"]["rows.train"]
    )
    every = product.run("--only", "sft", "--set", "stages.sft.with.max_length=3")
    assert every.code == 1
    assert "Traceback" not in every.text
    rows = int(product.nodes()["task"]["end"]["figures"]["rows.train"])
    assert f"{rows} rows, all dropped" in every.out and "raise max_length (now 3)" in every.out


def test_a_damaged_artifact_is_found_said_and_built_again(tmp_path: Path) -> None:
    product = untracked(tmp_path)
    assert product.run("--only", "sft").code == 0
    before = product.digests()
    weights = product.objects / before["sft"]["model"] / "model.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.parent.chmod(0o755)
    weights.chmod(0o644)
    weights.write_bytes(damaged)

    verified = product("store", "verify")
    assert verified.code == 1
    assert before["sft"]["model"][:12] in verified.out and "model.safetensors" in verified.out
    plan = {node["node"]: node for node in product("plan", "tiny.yaml", "--json").json()["nodes"]}
    assert plan["sft"]["standing"] == "stale"
    assert "model.safetensors" in plan["sft"]["reasons"][0]

    mended = product.run("--only", "sft")
    assert mended.code == 0, mended.text
    assert "model.safetensors" in mended.out and "building it again" in mended.out
    assert statuses(product) == {"task": "cached", "base": "cached", "sft": "completed"}
    assert product.digests() == before
    assert product("store", "verify", "--full").code == 0


def test_of_the_checkpoints_the_newest_sound_one_is_used_and_the_other_is_named(tmp_path: Path) -> None:
    product = untracked(tmp_path, LONG)
    process = product.start("run", "tiny.yaml", "--runner", "sequential", "--only", "sft")
    while len(list(product.workspace.glob("work/*/checkpoints/step-*"))) < 2:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    earlier, newest = sorted(product.workspace.glob("work/*/checkpoints/step-*"))[-2:]
    (newest / "weights.safetensors").write_bytes(b"\0" * 100)

    resumed = product("resume")
    assert resumed.code == 0, resumed.text
    assert f"checkpoint {newest.name} is skipped: weights.safetensors: expected" in resumed.out
    step = int(earlier.name.removeprefix("step-"))
    assert f"going on from step {step} of 400" in resumed.out
    assert steps_of(product.events("sft", 2))[0] == step + 1
    (tmp_path / "other").mkdir()
    undisturbed = untracked(tmp_path / "other", LONG)
    assert undisturbed.run("--only", "sft").code == 0
    assert undisturbed.digests() == product.digests()


@pytest.mark.mlflow
@pytest.mark.parametrize("size", ["40k", "300k", "700k"])
def test_a_full_disk_loses_nothing_and_the_run_goes_on_when_there_is_room(size: str, tmp_path: Path) -> None:
    product = Product.tiny(tmp_path)
    own_mounts(product, FILLED.format(size=size))
    full = done(product, "full")
    assert full.code == 1, full.text
    assert "Traceback" not in full.text
    assert "the disk is full" in full.text
    assert ".posttrain" in full.text
    assert "posttrain store gc" in full.text
    assert "Traceback" not in done(product, "status").text
    assert done(product, "verify").code == 0, done(product, "verify").text
    again = done(product, "again")
    assert again.code == 0, again.text
    for node in NODES:
        assert node in again.out
    assert done(product, "after").code == 0


@pytest.mark.mlflow
def test_a_store_that_cannot_be_written_is_named_and_still_read(tmp_path: Path) -> None:
    product = Product.tiny(tmp_path)
    assert product.run("--only", "base").code == 0
    own_mounts(product, SEALED.format(arguments="run tiny.yaml --runner sequential --only sft"))
    refused = done(product, "sealed")
    assert refused.code == 1, refused.text
    assert "Traceback" not in refused.text
    assert "read-only" in refused.text.lower()
    assert ".posttrain" in refused.text
    for arguments in ("status", "plan tiny.yaml", "store ls", "store verify", "explain base"):
        own_mounts(product, SEALED.format(arguments=arguments))
        assert done(product, "sealed").code == 0, (arguments, done(product, "sealed").text)
    cached = SEALED.format(arguments="run tiny.yaml --runner sequential --only base")
    own_mounts(product, cached)
    assert done(product, "sealed").code == 0, done(product, "sealed").text
    assert product.run("--only", "sft").code == 0
    assert list(processes_in(tmp_path)) == []
