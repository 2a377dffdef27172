"""The stage and the command that leave copies of rows out."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
from helpers.copies import Row, copies, pair, planted, text
from helpers.planning import command
from helpers.stages import StageRun, configured, contents, run_stage

from posttrain.artifacts.kinds import Kind
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.stage import Level
from posttrain.errors import DataError
from posttrain.registry.components import ConfigProblems
from posttrain_plugins.data.dedup import Dedup
from posttrain_plugins.data.load import Load
from posttrain_plugins.data.rows import read_rows
from posttrain_plugins.data.similarity.shingles import Hasher, folded

# The stage


def loaded(directory: Path, rows: Sequence[Row]) -> Artifact:
    directory.mkdir(parents=True)
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_stage(Load(), directory, path="rows.jsonl").result("data")


def ran(directory: Path, rows: Sequence[Row], **options: Any) -> StageRun:
    return run_stage(Dedup(), directory, {"data": [loaded(directory / "in", rows)]}, **options)


def test_the_stage_writes_what_is_left_and_reports_the_clusters(tmp_path: Path) -> None:
    rows, expected = planted(60)
    run = ran(tmp_path, rows)
    left = read_rows(run.result("data"))
    assert len(left) == 60 and all(row in rows for row in left)
    assert run.outcome is not None
    figures = {"rows": 69.0, "kept": 60.0, "equal": 3.0, "near": 6.0, "clusters": 6.0}
    assert dict(run.outcome.figures) == {**figures, "duplicate_rate": pytest.approx(9 / 69)}
    assert run.outcome.summary == "69 rows, 60 kept: 3 equal and 6 near copies"
    kind, facts = run.described["report"]
    assert kind is Kind.REPORT and facts.report == "deduplication" and facts.figures == run.outcome.figures
    lines = (run.output("report") / "clusters.jsonl").read_text().splitlines()
    clusters = [json.loads(line) for line in lines]
    found = [sorted([c["kept"] - 1, *(each["row"] - 1 for each in c["copies"])]) for c in clusters]
    assert sorted(found) == expected
    report = json.loads((run.output("report") / "report.json").read_text())
    assert report["figures"] == run.outcome.figures and report["options"]["threshold"] == 0.8
    first = report["examples"][0]
    assert first["size"] == 3
    assert first["kept"]["text"].lower().startswith(rows[first["kept"]["row"] - 1]["prompt"].lower()[:40])


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    rows, _ = planted(40)
    one, other = (ran(tmp_path / name, rows) for name in "ab")
    for port in ("data", "report"):
        assert contents(one.output(port)) == contents(other.output(port))


def test_equal_rows_are_found_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasketch", None)
    rows = [pair("a", "b"), pair("A", "b"), pair("c", "d")]
    assert ran(tmp_path / "exact", rows, near=False).described["data"][1].rows == 2
    with pytest.raises(DataError, match="`datasketch`, which is not installed") as error:
        ran(tmp_path / "near", rows)
    assert error.value.fix == "install datasketch, or look for equal rows alone"


def test_the_plan_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    (few,) = Dedup().check(configured(Dedup(), threshold=0.05, permutations=16), {})
    assert few.level is Level.ERROR and "too few permutations" in few.message
    assert list(Dedup().check(configured(Dedup(), near=False, threshold=0.05, permutations=16), {})) == []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (missing,) = Dedup().check(configured(Dedup()), {})
    assert missing.level is Level.WARNING and "datasketch" in missing.message


@pytest.mark.parametrize(
    "options", [{"threshold": 0}, {"threshold": 1.1}, {"size": 0}, {"shingles": "lines"}]
)
def test_impossible_options_are_refused(options: Row) -> None:
    with pytest.raises(ConfigProblems):
        configured(Dedup(), **options)


def test_similarities_do_not_depend_on_the_seed() -> None:
    rows, _ = planted(40)
    one, other = (copies(rows, threshold=0.7, seed=seed) for seed in (0, 1))
    assert one == other


def test_the_hashes_are_spread() -> None:
    found = numpy.concatenate([Hasher(3).shingles(text(n, 200)) for n in range(20)])
    assert len(numpy.unique(found)) > 3900
    assert abs((found >> numpy.uint64(63)).mean() - 0.5) < 0.05


# The command


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows, _ = planted(40)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_the_command_writes_what_is_left(here: Path) -> None:
    told = command("data", "dedup", "rows.jsonl", "--output", "left.jsonl", "--clusters", "clusters.jsonl")
    assert told.code == 0, told.err
    assert "46 rows, 40 kept: 2 equal and 4 near copies" in told.out
    assert "3 alike: row " in told.out
    assert len((here / "left.jsonl").read_text().splitlines()) == 40
    assert len((here / "clusters.jsonl").read_text().splitlines()) == 4
    again = command("data", "dedup", "left.jsonl", "--json")
    assert json.loads(again.out)["figures"]["kept"] == 40 == json.loads(again.out)["figures"]["rows"]


def test_the_command_looks_for_equal_rows_alone(here: Path) -> None:
    answer = json.loads(command("data", "dedup", "rows.jsonl", "--exact", "--json").out)
    assert (answer["figures"]["equal"], answer["figures"]["near"]) == (2, 0)
    verbatim = json.loads(command("data", "dedup", "rows.jsonl", "--exact", "--verbatim", "--json").out)
    assert verbatim["figures"]["equal"] == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--threshold", "2"], "threshold: Input should be less than or equal to 1"),
        (["--threshold", "0.05", "--permutations", "16"], "too few permutations"),
        (["--on", "page"], "no column `page`"),
        (["--output", "rows.jsonl"], "the output is there already"),
    ],
)
def test_the_command_says_what_is_wrong(here: Path, arguments: list[str], told: str) -> None:
    before = (here / "rows.jsonl").read_bytes()
    result = command("data", "dedup", "rows.jsonl", *arguments)
    assert result.code == 2 and told in result.err
    assert (here / "rows.jsonl").read_bytes() == before


def test_folding_reaches_every_string() -> None:
    assert folded({"A": ["B  c", 3, {"d": "E\n"}]}) == {"A": ["b c", 3, {"d": "e"}]}
