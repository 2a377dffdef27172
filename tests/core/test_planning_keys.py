"""Keys: everything that may change a node's outputs, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.planning import PLUGIN, catalogue, graph
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.artifacts.digest import DigestMemo
from posttrain.errors import DataError
from posttrain.pipeline import Pipeline
from posttrain.planning.keys import changes, differences, key_ingredients, key_of, source_digests
from posttrain.planning.nodes import Graph
from posttrain.registry.catalogue import Catalogue
from posttrain.registry.discovery import discover
from posttrain_plugins.training.offline import OfflineTrainer

INPUTS = {"data": ["d" * 64], "model": ["m" * 64]}


def ingredients(
    graph: Graph, node: str, base: Path = Path("/base"), plugins: Catalogue | None = None
) -> dict[str, Any]:
    memo = DigestMemo(base / "memo.sqlite")
    inputs = {port: INPUTS.get(port, ["e" * 64]) for port in graph.nodes[node].inputs}
    return key_ingredients(graph.nodes[node], plugins or catalogue(), inputs, base, memo)


def key(text: str, *sets: str, node: str = "sft") -> str:
    return key_of(ingredients(graph(text, *sets), node))


def training(options: str = "{}", rest: str = "") -> str:
    return (
        "stages:\n  chats: {uses: try/rows}\n"
        f"  sft: {{uses: try/train, inputs: {{data: chats.train}}, with: {options}{rest}}}\n"
    )


PLAIN = training("{learning_rate: 0.01, loss: {name: margin, beta: 0.2}}")
REWRITTEN = """
    # the same, written differently
    name: another
    defaults:
      try/train:
        with:
          loss: {beta: 2e-1, name: try/margin}
    stages:
      sft:
        with: {"learning_rate": 1e-2, seed: 0}
        inputs: {data: chats.train}
        uses: try/train
      chats:
        uses: try/rows
"""


@pytest.mark.parametrize(
    "same",
    [
        pytest.param(REWRITTEN, id="order, formatting, defaults, whole names"),
        pytest.param(
            training("{learning_rate: 0.01, loss: {beta: 0.2}, logging: 3}"), id="a volatile option"
        ),
        pytest.param(
            training("{learning_rate: 0.01, loss: {beta: 0.2}, token: env:HF_TOKEN}"), id="a secret"
        ),
        pytest.param(
            training("{learning_rate: 0.01, loss: {beta: 0.2}}", ", runtime: {env: {HF_TOKEN: env:OTHER}}"),
            id="a secret in the environment",
        ),
        pytest.param(
            training("{learning_rate: 0.01, loss: {beta: 0.2}}", ", resources: {cpus: 2}"), id="resources"
        ),
        pytest.param(training("{learning_rate: 0.01, loss: {beta: 0.2}, epochs: 3}"), id="a default"),
    ],
)
def test_these_keep_the_key(same: str) -> None:
    assert key(same) == key(PLAIN)


@pytest.mark.parametrize(
    "other",
    [
        training("{learning_rate: 0.02, loss: {beta: 0.2}}"),
        training("{learning_rate: 0.01, loss: {beta: 0.3}}"),
        training("{learning_rate: 0.01, loss: plain}"),
        training("{learning_rate: 0.01, loss: {beta: 0.2}, steps: 3}"),
        training("{learning_rate: 0.01, loss: {beta: 0.2}}", ", runtime: {env: {MODE: fast}}"),
    ],
)
def test_these_change_the_key(other: str) -> None:
    assert key(other) != key(PLAIN)


def test_the_name_of_the_node_is_no_ingredient() -> None:
    text = PLAIN.replace("sft:", "another:")
    assert key(text, node="another") == key(PLAIN)


def test_yaml_and_python_give_the_same_keys(tmp_path: Path) -> None:
    text = f"plugins: [{PLUGIN}]\n{PLAIN}"
    file = tmp_path / "pipeline.yaml"
    file.write_text(text)
    built = Pipeline(
        {
            "chats": {"uses": "try/rows"},
            "sft": {
                "uses": "try/train",
                "inputs": {"data": "chats.train"},
                "with": {"learning_rate": 0.01, "loss": {"name": "margin", "beta": 0.2}},
            },
        },
        plugins=[str(PLUGIN)],
    )
    read = Pipeline.from_file(file)
    for node in ("chats", "sft"):
        keys = {key_of(ingredients(p.graph(), node, tmp_path, p.catalogue)) for p in (built, read)}
        assert len(keys) == 1


def test_the_order_of_the_inputs_of_a_port_matters() -> None:
    text = PLAIN + "  eval: {uses: try/compare, inputs: {models: [sft]}}\n"
    node = graph(text).nodes["eval"]
    memo = DigestMemo(Path("/base/memo.sqlite"))
    one, other = (
        key_of(key_ingredients(node, catalogue(), {"models": models}, Path("/base"), memo))
        for models in (["a" * 64, "b" * 64], ["b" * 64, "a" * 64])
    )
    assert one != other


class TestSources:
    def digests(self, base: Path, name: str = "rows.txt") -> dict[str, Any]:
        built = graph(f"stages:\n  chats: {{uses: try/rows, with: {{path: {name}}}}}", base=base)
        return ingredients(built, "chats", base)

    def test_content_counts_and_neither_name_nor_time(self, tmp_path: Path) -> None:
        (tmp_path / "rows.txt").write_text("sea")
        (tmp_path / "other.txt").write_text("sea")
        os.utime(tmp_path / "other.txt", (1, 1))
        first = key_of(self.digests(tmp_path))
        assert first == key_of(self.digests(tmp_path, "other.txt"))
        (tmp_path / "rows.txt").write_text("see")
        assert first != key_of(self.digests(tmp_path))

    def test_a_moved_directory_keeps_its_keys(self, tmp_path: Path) -> None:
        for place in ("here", "there"):
            (tmp_path / place).mkdir()
            (tmp_path / place / "rows.txt").write_text("sea")
        assert self.digests(tmp_path / "here") == self.digests(tmp_path / "there")
        assert str(tmp_path) not in json.dumps(self.digests(tmp_path / "here"))

    def test_a_missing_one_is_an_error_with_its_option(self, tmp_path: Path) -> None:
        built = graph("stages:\n  chats: {uses: try/rows, with: {path: gone}}", base=tmp_path)
        with pytest.raises(DataError, match="this source does not exist") as caught:
            source_digests(built.nodes["chats"].config, tmp_path, DigestMemo(tmp_path / "memo"))
        assert (caught.value.where, caught.value.found) == ("path", str(tmp_path / "gone"))


def test_the_content_of_a_local_plugin_counts_and_not_its_place(tmp_path: Path) -> None:
    def first_key(file: Path) -> str:
        plugins = discover([file], installed=False)
        return key_of(ingredients(graph(PLAIN, plugins=plugins), "sft", plugins=plugins))

    copy = Path(shutil.copy(PLUGIN, tmp_path / "moved.py"))
    before = first_key(PLUGIN)
    assert first_key(copy) == before
    copy.write_text(copy.read_text() + "\n# a comment may be code tomorrow\n")
    assert first_key(copy) != before


def test_the_numerics_of_a_loop_that_a_plugin_shares_count(monkeypatch: pytest.MonkeyPatch) -> None:
    train = type(catalogue().stage("try/train"))
    monkeypatch.setattr(train, "shared", {"the loop": 1})
    before = ingredients(graph(PLAIN), "sft")
    monkeypatch.setattr(train, "shared", {"the loop": 2})
    after = ingredients(graph(PLAIN), "sft")
    assert key_of(before) != key_of(after)
    assert differences(before, after) == ["plugin: shared.the loop 1 → 2"]


def test_naming_the_built_in_loop_as_the_target_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    plugins = discover([PLUGIN])
    train = type(plugins.stage("try/train"))
    assert plugins.shared("try/train") == {} and plugins.shared("train.sft") == OfflineTrainer.shared
    monkeypatch.setattr(train, "target", OfflineTrainer.target)
    before = ingredients(graph(PLAIN, plugins=plugins), "sft", plugins=plugins)
    monkeypatch.setattr(OfflineTrainer, "shared", {"training loop": 9})
    after = ingredients(graph(PLAIN, plugins=plugins), "sft", plugins=plugins)
    assert differences(before, after) == ["plugin: shared.training loop 5 → 9"]


def test_a_target_of_ones_own_has_no_built_in_stage_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every worker asks, and a built-in stage that is broken is no business of other plugins."""
    plugins, made = discover([PLUGIN]), []
    make = plugins.make
    monkeypatch.setattr(plugins, "make", lambda group, name: made.append(name) or make(group, name))
    assert plugins.shared("try/train") == {} and made == ["try/train"]


def test_whoever_uses_the_built_in_loop_has_its_numerics_in_the_key() -> None:
    class Third(OfflineTrainer):
        formats = frozenset({"text"})

    assert Third.target == OfflineTrainer.target and Third.shared == {"training loop": 5}


CHILD = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
from helpers.planning import catalogue, graph
from posttrain.artifacts.digest import DigestMemo
from posttrain.planning.keys import key_ingredients, key_of
node = graph({text!r}).nodes["chats"]
print(key_of(key_ingredients(node, catalogue(), {{}}, Path("/base"), DigestMemo(Path("/base/memo")))))
"""


def test_another_process_computes_the_same_key() -> None:
    text = "stages:\n  chats: {uses: try/rows, with: {tags: [" + ", ".join("abcdefghij") + "]}}"
    source = CHILD.format(path=[str(Path(__file__).parents[1])], text=text)
    found = set()
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        child = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=env)
        assert child.returncode == 0, child.stderr
        found.add(child.stdout.strip())
    assert found == {key(text, node="chats")}


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "learning_rate": st.floats(1e-9, 1.0) | st.integers(1, 3),
        "steps": st.none() | st.integers(0, 10**6),
        "seed": st.integers(-(2**70), 2**70),
        "loss": st.sampled_from(["margin", "plain", "try/margin"])
        | st.fixed_dictionaries({"name": st.just("margin")}, optional={"beta": st.floats(1e-6, 1e6)}),
        "logging": st.integers(1, 9),
    },
)


def node_of(options: dict[str, Any]) -> Any:
    stages = {
        "chats": {"uses": "try/rows"},
        "sft": {"uses": "try/train", "inputs": {"data": "chats.train"}, "with": options},
    }
    return graph(stages)


def meaning(options: dict[str, Any]) -> tuple[Any, ...]:
    """What the options mean, told independently of the key."""
    config = node_of(options).nodes["sft"].config
    loss = (config.loss.name, config.loss.options.get("beta"))
    return config.learning_rate, config.steps, config.seed, loss


@settings(max_examples=60, deadline=None)
@given(OPTIONS, OPTIONS)
def test_keys_are_equal_exactly_when_the_options_mean_the_same(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    keys = [key_of(ingredients(node_of(options), "sft")) for options in (one, other)]
    assert (keys[0] == keys[1]) == (meaning(one) == meaning(other))
    assert key_of(ingredients(node_of(dict(reversed(one.items()))), "sft")) == keys[0]


class TestDifferences:
    def test_an_option(self) -> None:
        old, new = (
            ingredients(graph(training(f"{{loss: {{name: margin, beta: {beta}}}}}")), "sft")
            for beta in (0.1, 0.2)
        )
        assert differences(old, new) == ["with.loss.beta: 0.1 → 0.2"]
        assert differences(old, old) == []

    def test_another_component_is_told_once(self) -> None:
        old, new = (ingredients(graph(training(f"{{loss: {loss}}}")), "sft") for loss in ("margin", "plain"))
        assert differences(old, new) == [
            "with.loss.name: try/margin → try/plain",
            "with.loss.beta: 0.1 → (absent)",
        ]

    def test_everything_else(self) -> None:
        old = {
            "stage": {"name": "train", "numerics": 1},
            "components": {"loss": {"name": "margin", "numerics": 1}},
            "config": {"seed": 0, "flag": True, "none": None, "text": ""},
            "sources": {"path": "a" * 64},
            "inputs": {"data": ["a" * 64], "models": ["b" * 64, "c" * 64]},
            "environment": {},
        }
        new = {
            "stage": {"name": "train", "numerics": 2},
            "components": {"loss": {"name": "margin", "numerics": 3}},
            "config": {"seed": 0, "flag": False, "none": 1, "text": "x" * 100},
            "sources": {"path": "b" * 64},
            "inputs": {"data": ["d" * 64], "models": ["b" * 64]},
            "environment": {"MODE": "fast"},
        }
        assert differences(old, new) == [
            "plugin: numerics 1 → 2",
            "plugin of with.loss: numerics 1 → 3",
            "with.flag: true → false",
            "with.none: null → 1",
            f'with.text: "" → {"x" * 79}…',
            "the content of with.path changed",
            "input data changed (aaaaaaaaaaaa → dddddddddddd)",
            "input models changed (bbbbbbbbbbbb, cccccccccccc → bbbbbbbbbbbb)",
            "runtime.env.MODE: (absent) → fast",
        ]

    def test_digests_of_plugins_are_as_short_as_in_the_plan(self) -> None:
        old = {"stage": {"source": "a" * 64}, "components": {"loss": {"name": "x", "file": "b" * 64}}}
        new = {"stage": {"source": "c" * 64}, "components": {"loss": {"name": "x", "file": "d" * 64}}}
        assert differences(old, new) == [
            "plugin: source aaaaaaaa → cccccccc",
            "plugin of with.loss: file bbbbbbbb → dddddddd",
        ]

    def test_of_records_without_some_ingredients(self) -> None:
        assert differences({"config": {"a": 1}}, {"components": {}, "config": {"a": 1}, "more": 1}) == [
            "its plugins: (absent) → {}",
            "its ingredients: (absent) → 1",
        ]

    def test_equal_values_of_other_types_differ(self) -> None:
        assert [change[0] for change in changes({"a": 1, "b": [1]}, {"a": True, "b": [1]})] == [("a",)]
