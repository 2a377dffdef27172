"""`data.split` and `posttrain data split`: rows stay where their content puts them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from helpers.planning import command
from helpers.stages import StageRun, configured, run_stage
from pydantic import ValidationError

from posttrain.artifacts.kinds import Kind
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.stage import Input, Level
from posttrain.errors import DataError
from posttrain.registry.components import ConfigProblems
from posttrain_plugins.data.load import Load
from posttrain_plugins.data.rows import read_rows, trained_prompts
from posttrain_plugins.data.split import Split
from posttrain_plugins.data.splits import SplitConfig

Row = dict[str, Any]


def rows_of(count: int) -> list[Row]:
    return [
        {"prompt": f"question {n % 60}", "completion": f"answer {n}", "source": f"page {n % 9}"}
        for n in range(count)
    ]


def write(path: Path, rows: list[Row]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def loaded(directory: Path, rows: list[Row]) -> Artifact:
    write(directory / "rows.jsonl", rows)
    return run_stage(Load(), directory, path="rows.jsonl").result("data")


def ran(directory: Path, rows: list[Row], **options: Any) -> StageRun:
    return run_stage(Split(), directory, {"data": [loaded(directory / "in", rows)]}, **options)


def parts_of(run: StageRun) -> dict[str, list[Row]]:
    return {port: read_rows(run.result(port)) for port in run.described}


def test_what_a_split_has_chosen_is_split_again_with_a_salt(tmp_path: Path) -> None:
    first = parts_of(ran(tmp_path / "first", rows_of(300), split={"test": 0.3}))["train"]
    with pytest.raises(DataError, match="the split `test`") as caught:
        ran(tmp_path / "again", first, split={"test": 0.2})
    assert "split_salt" in str(caught.value.fix)
    again = parts_of(ran(tmp_path / "salted", first, split={"test": 0.2}, split_salt="two"))
    assert {name: bool(part) for name, part in again.items()} == {"train": True, "test": True}
    assert not {row["prompt"] for row in again["train"]} & {row["prompt"] for row in again["test"]}


def test_neither_order_nor_further_rows_move_a_row(tmp_path: Path) -> None:
    rows = rows_of(120)
    shuffled = rows_of(300)
    random.Random(0).shuffle(shuffled)
    few, many = (
        parts_of(ran(tmp_path / name, given, split={"test": 0.3, "dev": 0.1}))
        for name, given in (("few", rows), ("many", shuffled))
    )
    assert sorted(few) == ["dev", "test", "train"]
    assert sum(map(len, few.values())) == 120 and sum(map(len, many.values())) == 300
    for name, part in few.items():
        assert part and all(row in many[name] for row in part)


def test_a_part_keeps_the_order_of_its_rows_and_all_their_columns(tmp_path: Path) -> None:
    rows = rows_of(50)
    parts = parts_of(ran(tmp_path, rows, split={"test": 0.5}))
    for part in parts.values():
        assert part == [row for row in rows if row in part]


def test_no_prompt_is_in_two_parts(tmp_path: Path) -> None:
    run = ran(tmp_path, rows_of(200), split={"test": 0.4})
    train, test = ((run.output(port) / "prompts.txt").read_text().split() for port in ("train", "test"))
    assert train and test and not trained_prompts(train) & trained_prompts(test)
    assert run.said == []


def test_rows_of_a_group_stay_together_and_shared_prompts_are_told(tmp_path: Path) -> None:
    run = ran(tmp_path, rows_of(90), split={"test": 0.4}, split_by="group", split_column="source")
    groups = [{row["source"] for row in part} for part in parts_of(run).values()]
    assert groups[0] and groups[1] and not groups[0] & groups[1]
    prompts = [{row["prompt"] for row in part} for part in parts_of(run).values()]
    shared = len(prompts[0] & prompts[1])
    assert shared
    ((level, told),) = run.said
    assert level is Level.WARNING and told.startswith(f"{shared} prompts are in several parts")


def test_splitting_by_row_tells_of_shared_prompts(tmp_path: Path) -> None:
    run = ran(tmp_path, rows_of(200), split={"test": 0.5}, split_by="row")
    assert "prompts are in several parts" in run.said[0][1]


def test_the_policy_that_wrote_the_rows_is_not_forgotten(tmp_path: Path) -> None:
    data = loaded(tmp_path / "in", rows_of(40))
    facts = data.facts.model_copy(update={"policy": "f" * 64})
    data = Artifact(data.digest, data.manifest.model_copy(update={"facts": facts}), data.path)
    run = run_stage(Split(), tmp_path, {"data": [data]}, split={"test": 0.5})
    assert {facts.policy for _, facts in run.described.values()} == {"f" * 64}
    predicted = Split().predict(run.config, {"data": [Input("a.data", Kind.DATASET, facts, data)]})
    assert predicted["test"].facts.policy == "f" * 64
    assert predicted["test"].facts.rows is None


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "`split` says into which parts"),
        ({"split": {"test": 0.1}, "split_by": "group"}, "needs `split_column`"),
        ({"split": {"test": 0.1}, "split_column": "source"}, "belongs to `split_by: group`"),
        ({"split": {"test": 5}}, "must be a fraction below 1"),
    ],
)
def test_options_that_make_no_split_are_refused(options: Row, told: str) -> None:
    with pytest.raises(ConfigProblems) as error:
        configured(Split(), **options)
    assert told in str(error.value.problems)


def test_an_empty_part_and_a_missing_column_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"`test` \(0.0001 of the rows\) is empty"):
        ran(tmp_path / "a", rows_of(20), split={"test": 0.0001})
    with pytest.raises(DataError, match="no column `page` to split by") as error:
        ran(tmp_path / "b", rows_of(20), split={"test": 0.5}, split_by="group", split_column="page")
    assert error.value.found == "columns completion, prompt, source"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lines(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_command_splits_as_the_stage_does(here: Path) -> None:
    rows = rows_of(100)
    write(here / "rows.jsonl", rows)
    told = command("data", "split", "rows.jsonl", "--test", "0.3", "--output", "parts", "--json")
    assert told.code == 0, told.err
    answer = json.loads(told.out)
    staged = parts_of(ran(here / "stage", rows, split={"test": 0.3}))
    for name in ("train", "test"):
        assert lines(here / "parts" / f"{name}.jsonl") == staged[name]
        assert answer["parts"][name] == {"file": f"parts/{name}.jsonl", "rows": len(staged[name])}
    assert answer["format"] == "prompt_completion" and answer["shared_prompts"] == 0


def test_the_command_splits_by_a_column_into_several_parts(here: Path) -> None:
    write(here / "rows.jsonl", rows_of(90))
    arguments = ["--test", "0.3", "--part", "dev=0.3", "--by", "source", "--output", "parts"]
    told = command("data", "split", "rows.jsonl", *arguments)
    assert told.code == 0, told.err
    assert "prompts are in several parts" in told.err
    groups = [
        {row["source"] for row in lines(here / "parts" / f"{n}.jsonl")} for n in ("train", "dev", "test")
    ]
    assert sum(map(len, groups)) == len(set.union(*groups)) == 9


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["rows.jsonl"], "name at least one split"),
        (["rows.jsonl", "--test", "12"], "must be a fraction below 1"),
        (["rows.jsonl", "--part", "dev"], "a part needs a name and a share"),
        (["rows.jsonl", "--test", "0.5", "--by", "nothing"], "no column `nothing` to split by"),
        (["gone.jsonl", "--test", "0.5"], "there is neither a file nor a dataset of that name"),
        (["rows.jsonl", "--test", "0.5", "--format", "messages"], "messages"),
    ],
)
def test_the_command_says_what_is_wrong(here: Path, arguments: list[str], told: str) -> None:
    write(here / "rows.jsonl", rows_of(30))
    result = command("data", "split", *arguments, "--output", "parts")
    assert result.code in (1, 2)
    assert told in result.err and "Traceback" not in result.err
    assert not (here / "parts").exists()


def test_the_command_overwrites_on_demand_alone(here: Path) -> None:
    write(here / "rows.jsonl", rows_of(30))
    write(here / "parts" / "test.jsonl", [{"prompt": "mine"}])
    arguments = ["data", "split", "rows.jsonl", "--test", "0.5", "--output", "parts"]
    refused = command(*arguments)
    assert refused.code == 2 and "parts/test.jsonl" in refused.err and "--overwrite" in refused.err
    assert lines(here / "parts" / "test.jsonl") == [{"prompt": "mine"}]
    assert command(*arguments, "--overwrite").code == 0
    assert len(lines(here / "parts" / "test.jsonl")) > 3


def test_split_config_is_shared_with_data_load(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", rows_of(90))
    grouped = {"split": {"test": 0.4}, "split_by": "group", "split_column": "source"}
    run = run_stage(Load(), tmp_path, path="rows.jsonl", **grouped)
    groups = [{row["source"] for row in part} for part in parts_of(run).values()]
    assert groups[0] and groups[1] and not groups[0] & groups[1]
    with pytest.raises(ValidationError):
        SplitConfig(split_by="group")
