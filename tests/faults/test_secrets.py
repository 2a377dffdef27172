"""A secret stays where it was declared: in no file, no database, no process title, no message."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.products import Done, Product, processes_in, read_all

from posttrain.errors import SpecError
from posttrain.planning.secrets import resolve

CANARY, OTHER = "canary-7f3a9c51d2e84b60", "canary-e5510b7742aa91cd"

LEAKY = '''\
import json
import os
import sys
import time

import posttrain
from posttrain.artifacts.kinds import DatasetFacts, Kind
from posttrain.contracts.stage import Outcome, Port, Secret, Stage, StageConfig

POSTTRAIN_API = ">=1,<2"


class Options(StageConfig):
    """Options of `leaky`.

    Args:
        token: Logs in.
        fails: Whether it raises.
    """

    token: Secret = "env:CANARY"
    fails: bool = False


class Leaky(Stage):
    """Says everything it knows."""

    config = Options
    target = f"{__name__}:run"

    def outputs(self, config):
        return (Port("data", frozenset({Kind.DATASET}), frozenset({"text"})),)


def run(context):
    token = context.secret(context.config.token)
    print("printed", token, flush=True)
    print("complained", token, file=sys.stderr, flush=True)
    context.note(f"noted {token}")
    context.progress(1, 2, f"units of {token}")
    time.sleep(1)
    if context.config.fails:
        raise RuntimeError(f"https://user:{token}@example.org refused {token}")
    known = sorted(name for name in os.environ if "CANARY" in os.environ[name] or "canary" in os.environ[name])
    (context.output("data") / "rows.jsonl").write_text(json.dumps({"text": " ".join(known)}) + "\\n")
    (context.output("data") / "prompts.txt").write_text("")
    context.describe("data", Kind.DATASET, DatasetFacts(format="text", rows=1))
    return Outcome(summary=f"logged in with {token}")


@posttrain.hookimpl
def posttrain_stages():
    return [posttrain.Registration("leaky", "Says everything.", Leaky)]
'''

SECRETIVE = """\
name: secretive
plugins: [./leaky.py]
stages:
  quiet: {uses: data.synthetic, with: {generator: reverse, rows: 9}, runtime: {env: {MY_TOKEN: "env:CANARY"}}}
  leaky: {uses: leaky, with: {token: "env:CANARY"}}
"""


@pytest.fixture
def secretive(tmp_path: Path) -> Iterator[Product]:
    product = Product(tmp_path, env={"CANARY": CANARY, "HF_TOKEN": OTHER, "MLFLOW_TRACKING_TOKEN": OTHER})
    product.write("leaky.py", LEAKY)
    product.write("p.yaml", SECRETIVE)
    yield product
    if (product.workspace / "services").is_dir():
        product("down")


def holding(product: Product) -> Iterator[str]:
    """Yield the files that hold a secret."""
    for path, data in read_all(product.base):
        if CANARY.encode() in data or OTHER.encode() in data:
            yield str(path)


def clean(product: Product, done: Done) -> None:
    assert CANARY not in done.text and OTHER not in done.text
    assert list(holding(product)) == []


@pytest.mark.slow
@pytest.mark.prefect
@pytest.mark.mlflow
@pytest.mark.parametrize("fails", [False, True])
def test_a_declared_secret_is_written_nowhere(secretive: Product, fails: bool) -> None:
    process = secretive.start("run", "p.yaml", "--set", f"stages.leaky.with.fails={str(fails).lower()}")
    titles: set[str] = set()
    while process.poll() is None:
        titles |= {" ".join(each.cmdline()) for each in processes_in(secretive.base, server=True)}
        time.sleep(0.1)
    out, err = process.communicate()
    assert process.returncode == int(fails), out + err
    assert any("posttrain.execution" in title for title in titles)
    assert not any(CANARY in title or OTHER in title for title in titles)
    assert "[redacted]" in out
    clean(secretive, Done(process.returncode, out, err))
    if not fails:
        digest = secretive.digests()["leaky"]["data"]
        assert (secretive.objects / digest / "rows.jsonl").read_text() == '{"text": "CANARY"}\n'
    for arguments in (("status", "--json"), ("explain", "quiet"), ("store", "ls"), ("down",)):
        clean(secretive, secretive(*arguments))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('token: "env:CANARY"', f"token: {CANARY}"),
        ('MY_TOKEN: "env:CANARY"', f"MY_TOKEN: {CANARY}"),
        ("rows: 9", f"rows: 9, api_key: {CANARY}"),
        ("name: secretive", f"name: secretive\nsecrets: {{token: {CANARY}}}"),
    ],
    ids=["an option", "a variable", "an option that does not exist", "a section that does not exist"],
)
def test_a_secret_in_the_file_is_refused_and_not_repeated(secretive: Product, old: str, new: str) -> None:
    path = secretive.write("p.yaml", SECRETIVE.replace(old, new))
    assert CANARY in path.read_text()
    for verb in ("plan", "run"):
        done = secretive(verb, "p.yaml")
        assert done.code == 2, done.text
        assert "p.yaml:" in done.err
        assert CANARY not in done.text
    assert list(holding(secretive)) == [str(path)]


@pytest.mark.parametrize("key", ["leaky.with.token", "quiet.runtime.env.MY_TOKEN", "quiet.with.api_key"])
def test_a_secret_on_the_command_line_is_refused_and_not_repeated(secretive: Product, key: str) -> None:
    done = secretive("run", "p.yaml", "--set", f"stages.{key}={CANARY}")
    assert done.code == 2, done.text
    assert "--set" in done.err
    clean(secretive, done)


@pytest.mark.slow
@pytest.mark.mlflow
def test_a_secret_that_is_missing_is_named(secretive: Product) -> None:
    bare = Product(secretive.base, env={"CANARY": None})
    done = bare("run", "p.yaml", "--runner", "sequential")
    assert done.code != 0
    assert "CANARY" in done.text and "environment variable" in done.text
    assert "Traceback" not in done.text


def test_a_reference_to_a_secret_is_no_value() -> None:
    with pytest.raises(SpecError, match="no reference to a secret") as caught:
        resolve(CANARY, {})
    assert CANARY not in str(caught.value)
