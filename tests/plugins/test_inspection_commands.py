from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.looking import HOSTILE, jsonl, model_at, turns
from helpers.stores import key_record

from posttrain.artifacts.kinds import Kind, PolicyFacts
from posttrain.artifacts.manifest import Provenance
from posttrain.artifacts.store import Store
from posttrain.errors import PosttrainError, SpecError
from posttrain_plugins.commands.inspect import inspect
from posttrain_plugins.commands.statistics import statistics
from posttrain_plugins.data.rows import write_rows

ROWS = [
    {"messages": turns("The quick?", "It said: no")},
    {"messages": turns("Hi")},
    {"messages": turns("a", "b")},
]


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(model_at(tmp_path / "model"))


@pytest.fixture
def data(tmp_path: Path) -> str:
    return str(jsonl(tmp_path / "train.jsonl", ROWS))


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_inspect_for_machines(data: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    inspect(data, model, row=["1-2"], as_json=True)
    found = said(capsys)
    assert (found["format"], found["rows"], found["training"]["trainer"]) == ("messages", 3, "train.sft")
    assert found["training"]["usable"] == 2
    assert found["training"]["dropped"] == {"no assistant turn": {"count": 1, "rows": [2]}}
    assert [row["place"] for row in found["shown"]] == ["line 1", "line 2"]
    (side,) = found["shown"][0]["sides"]
    learned = "".join(piece["text"] for piece in side["pieces"] if piece["supervised"])
    assert learned == "It said: no<|im_end|>"
    assert side["supervised"] == sum(piece["supervised"] for piece in side["pieces"])
    assert found["model"]["context"] == found["training"]["max_length"] == 4096


def test_inspect_for_people(data: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    inspect(data, model)
    shown = capsys.readouterr().out
    assert "usable        2 of 3 rows" in shown
    assert "⟦It said: no<|im_end|>⟧" in shown
    assert "left out of training: no assistant turn" in shown


def test_options_of_the_trainer(data: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    inspect(data, model, max_length=12, truncation="drop", with_=["supervise=everything"], as_json=True)
    found = said(capsys)
    assert (found["training"]["max_length"], found["training"]["truncation"]) == (12, "drop")
    assert found["training"]["intended"]


def test_a_page(data: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inspect(data, model, html=tmp_path / "new" / "page.html")
    assert "3 of 3 rows shown" in capsys.readouterr().out
    assert (tmp_path / "new" / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_page_never_takes_the_place_of_data(data: str, model: str) -> None:
    before = Path(data).read_bytes()
    with pytest.raises(SpecError, match="a page needs a name that ends so"):
        inspect(data, model, html=Path(data))
    assert Path(data).read_bytes() == before


@pytest.mark.parametrize("rows", ["0", "x", "5-2", "1-", "-1", "1-99999"])
def test_rows_that_are_none(data: str, model: str, rows: str) -> None:
    with pytest.raises(SpecError, match="names no rows"):
        inspect(data, model, row=[rows])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"trainer": "train.dpo"}, "takes no rows of format `messages`"),
        ({"trainer": "train.nothing"}, "train.nothing"),
        ({"row": ["4"]}, "no such row"),
        ({"with_": ["supervise"]}, "needs a value"),
        ({"with_": ["supervise=nothing"]}, "supervise"),
        ({"truncation": "somehow"}, "truncation"),
        ({"max_length": 1}, "max_length"),
    ],
)
def test_what_is_not_possible_is_explained(
    data: str, model: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(PosttrainError, match=message):
        inspect(data, model, **arguments)


def test_a_dataset_and_a_model_of_the_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store(tmp_path / ".posttrain")
    directory = store.scratch("load.data")
    store.seal(directory, Kind.DATASET, write_rows(directory, ROWS, "messages"))
    dataset = store.commit(directory, _provenance("load", "data"))
    directory = store.scratch("base.model")
    store.seal(model_at(directory), Kind.MODEL, PolicyFacts(context=99))
    model = store.commit(directory, _provenance("base", "model"))
    store.record(key_record("1" * 64, {"data": dataset.digest}))
    store.record(key_record("2" * 64, {"model": model.digest}, node="base"))
    for data, name in ((dataset.digest[:12], model.ref), ("load.data", "base.model")):
        inspect(data, name, workspace=store.workspace, as_json=True)
        found = said(capsys)
        assert (found["rows"], found["model"]["context"]) == (3, 99)
        statistics(data, name, workspace=store.workspace, as_json=True)
        assert said(capsys)["rows"] == 3


def _provenance(node: str, port: str) -> Provenance:
    return Provenance(
        stage="data.load", node=node, port=port, key="k", run="r1", parents={}, created="2025-01-02T03:04:05"
    )


def test_statistics_without_a_model(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    statistics(data, as_json=True)
    found = said(capsys)
    assert (found["rows"], found["format"], found["tokens"], found["equal_rate"]) == (
        3,
        "messages",
        None,
        0.0,
    )
    statistics(data)
    shown = capsys.readouterr().out
    assert "messages of a row" in shown
    assert "row 1 (21 characters)" in shown


def test_statistics_with_a_model(data: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    statistics(data, model, as_json=True)
    found = said(capsys)
    assert found["tokens"]["total"] > 0
    assert found["model"]["template"]
    statistics(data, model)
    assert "tokens of a sequence" in capsys.readouterr().out


def test_a_file_of_another_tool(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"instruction": "name a word", "input": "", "output": f"{HOSTILE} {i}"} for i in range(3)]
    inspect(str(jsonl(tmp_path / "alpaca.jsonl", rows)), model, as_json=True)
    assert said(capsys)["training"]["usable"] == 3


def test_the_verbs_are_light(data: str, model: str) -> None:
    code = (
        "import sys\n"
        "sys.argv = ['posttrain', 'data', 'inspect', sys.argv[1], '--model', sys.argv[2]]\n"
        "from posttrain.cli import main\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    heavy = {'torch', 'transformers', 'datasets', 'numpy', 'pyarrow', 'pandas'} & set(sys.modules)\n"
        "    assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, data, model], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "⟦It said: no<|im_end|>⟧" in done.stdout


def pairs_with(directory: Path, **columns: Any) -> str:
    rows = [
        {"prompt": "It said: ", "chosen": f"word {i}", "rejected": f"name {i}", **columns} for i in range(3)
    ]
    return str(jsonl(directory / "pairs.jsonl", rows))


def test_columns_that_a_loss_needs_are_looked_for(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    inspect(pairs_with(tmp_path), model, trainer="train.dpo", with_=["loss=xpo"], as_json=True)
    found = said(capsys)["training"]
    assert found["usable"] == 0 and "`chosen_by` is missing" in next(iter(found["dropped"]))
    inspect(
        pairs_with(tmp_path, chosen_by="policy"), model, trainer="train.dpo", with_=["loss=xpo"], as_json=True
    )
    assert said(capsys)["training"]["usable"] == 3
