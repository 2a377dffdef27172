"""`posttrain init`, `recipes`, `schema`, `doctor`, and that every shipped recipe loads, plans and has its keys."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from helpers.planning import PLUGIN, alone, command, write_pipeline

from posttrain.contracts.registration import Group
from posttrain.planning.source import load
from posttrain.registry.discovery import discover

RECIPES = discover().names(Group.RECIPE)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone(tmp_path, monkeypatch, flows=True)


def parsed(*arguments: str | Path) -> Any:
    told = command(*arguments)
    assert told.code == 0, told.err
    return json.loads(told.out)


def test_recipes_are_listed() -> None:
    listed = parsed("recipes", "--json")
    assert [recipe["name"] for recipe in listed] == RECIPES
    assert all(Path(recipe["file"]).is_file() for recipe in listed)
    assert "quickstart" in command("recipes").out
    (quickstart,) = [recipe["summary"] for recipe in listed if recipe["name"] == "quickstart"]
    assert quickstart.endswith("then from its own right and wrong answers"), (
        "a whole sentence, and only the first"
    )


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("tiny", [[], ["--tiny"]])
def test_a_recipe_plans(recipe: str, tiny: list[str]) -> None:
    plan = parsed("plan", recipe, *tiny, "--json")
    assert plan["refused"] == 0 and not plan["warnings"]
    assert {node["standing"] for node in plan["nodes"]} == {"new"} and len(plan["nodes"]) > 3
    told = command("plan", recipe, *tiny)
    assert told.code == 0
    assert all(len(line) <= 100 for line in told.out.splitlines() if "posttrain.execution" not in line)


def test_a_tiny_plan_is_smaller() -> None:
    nodes = {node["node"]: node for node in parsed("plan", "quickstart", "--tiny", "--json")["nodes"]}
    assert nodes["task"]["config"]["rows"] == 100
    assert nodes["task"]["config"]["split"] == pytest.approx({"prompts": 1 / 3, "test": 1 / 3})
    assert nodes["task"]["origins"]["split.test"] == "--tiny"
    assert nodes["dpo"]["config"]["max_steps"] == 2, "though the file sets num_train_epochs"
    assert nodes["dpo"]["origins"]["num_train_epochs"] == "default"


def test_a_tiny_plan_leaves_no_split_empty() -> None:
    rows = [{"prompt": f"say {n}", "completion": str(n)} for n in range(40)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("p.yaml").write_text(
        "stages:\n"
        "  rows: {uses: data.load, with: {path: rows.jsonl, split: {test: 0.0001}}}\n"
        "  more: {uses: data.synthetic, with: {generator: reverse, rows: 50, split: {test: 0.0001}}}\n"
    )
    assert command("plan", "p.yaml").code == 2, "the fractions are too small for so few rows"
    rows_node, more = parsed("plan", "p.yaml", "--tiny", "--json")["nodes"]
    assert rows_node["config"]["split"] == more["config"]["split"] == {"test": 0.5}
    assert (rows_node["config"]["limit"], more["config"]["rows"]) == (200, 50)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_copy_has_the_keys_of_the_recipe(recipe: str) -> None:
    told = command("init", recipe)
    copy = Path(f"{recipe}.yaml")
    assert told.code == 0 and f"posttrain plan {copy}" in told.out
    assert Path("posttrain.schema.json").is_file()
    ours, theirs = parsed("plan", copy, "--json"), parsed("plan", recipe, "--json")
    assert [node["key"] for node in ours["nodes"]] == [node["key"] for node in theirs["nodes"]]
    assert any(node["key"] for node in ours["nodes"])
    again = command("init", recipe)
    assert again.code == 2 and "this file exists already" in again.err


def test_init_elsewhere_and_of_nothing() -> None:
    assert command("init", "quickstart", "--to", "mine.yaml", "--no-schema").code == 0
    assert sorted(path.name for path in Path().iterdir()) == ["mine.yaml"]
    told = command("init", "quickstrat")
    assert told.code == 2 and "quickstart" in told.err
    told = command("init", "--to", "no/such/place.yaml")
    assert told.code == 1 and "Traceback" not in told.err and "no/such" in told.err


@cache
def validator() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(parsed("schema"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_schema_accepts_a_recipe_and_refuses_a_typo(recipe: str) -> None:
    data = load(Path(discover().load(Group.RECIPE, recipe))).data
    assert list(validator().iter_errors(data)) == []
    name = next(iter(data["stages"]))
    data["stages"][name]["with"]["no_such_option"] = 1
    assert not validator().is_valid(data)


def test_the_schema_of_a_pipeline_knows_its_local_plugins() -> None:
    file = write_pipeline(Path("p.yaml"), "stages:\n  a: {uses: try/rows}\n")
    data = load(file).data
    assert jsonschema.Draft202012Validator(parsed("schema", file)).is_valid(data)
    assert not jsonschema.Draft202012Validator(parsed("schema")).is_valid(data)


def test_doctor_reports_what_is_there() -> None:
    checks = {check["check"]: check for check in parsed("doctor", "--json")}
    assert checks["torch"]["ok"] and checks["python"]["ok"] and checks["plugin builtin"]["ok"]
    assert all(line.startswith("ok ") for line in command("doctor").out.splitlines())


def test_doctor_finds_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("file").write_text("")
    told = command("doctor", "--workspace", "file/inside")
    assert told.code == 1
    (line,) = [line for line in told.out.splitlines() if line.startswith("fault ")]
    assert "workspace" in line and "fix: make" in line
    monkeypatch.setenv("POSTTRAIN_DISABLE_PLUGINS", "flows")
    checks = {check["check"]: check for check in json.loads(command("doctor", "--json").out)}
    assert not checks["plugin flows"]["ok"]


def test_a_plugin_file_is_named_where_it_is_missing() -> None:
    file = write_pipeline(Path("p.yaml"), "stages:\n  a: {uses: try/rows}\n", [PLUGIN.with_name("gone.py")])
    told = command("plan", file)
    assert told.code == 2 and "gone.py" in told.err and "Traceback" not in told.err
