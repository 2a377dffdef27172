from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from helpers.evaluation import dataset
from helpers.stages import StageRun, configured, contents, run_stage
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.artifacts.kinds import DatasetFacts, Kind
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.stage import Input, Level
from posttrain.errors import DataError
from posttrain.registry.components import ConfigProblems
from posttrain_plugins.data.mix import Mix, mixed
from posttrain_plugins.data.rows import read_rows
from posttrain_plugins.data.shares import Stop, apportioned, counts_of


def texts(name: str, count: int) -> list[dict[str, Any]]:
    return [{"text": f"{name} {number}"} for number in range(count)]


def sources(tmp_path: Path, **sizes: int) -> dict[str, list[Artifact]]:
    return {"data": [dataset(tmp_path / name, texts(name, size), "text") for name, size in sizes.items()]}


def parts(run: StageRun) -> Counter[str]:
    return Counter(row["text"].split()[0] for row in read_rows(run.result("data")))


def test_shares_are_exact(tmp_path: Path) -> None:
    inputs = sources(tmp_path, a=400, b=900)
    run = run_stage(Mix(), tmp_path, inputs, weights=[0.25, 0.75], rows=1000)
    assert parts(run) == {"a": 250, "b": 750}
    rows = [row["text"] for row in read_rows(run.result("data"))]
    assert len(set(rows)) == 1000
    # Chosen over the whole of each dataset, and shuffled.
    places = [int(text.split()[1]) for text in rows if text.startswith("a ")]
    assert max(places) > 380
    assert places != sorted(places)
    assert 10 < sum(text.startswith("a ") for text in rows[:100]) < 45


def test_the_seed_decides_which_rows_and_their_order(tmp_path: Path) -> None:
    inputs = sources(tmp_path, a=50, b=50)
    made = [
        contents(
            run_stage(Mix(), tmp_path / str(n), inputs, weights=[1, 1], rows=40, seed=seed).output("data")
        )
        for n, seed in enumerate((7, 7, 8))
    ]
    assert made[0] == made[1]
    assert set(made[0]["rows.jsonl"].split()) != set(made[2]["rows.jsonl"].split())


def test_a_row_that_is_chosen_stays_chosen_when_rows_change_their_places() -> None:
    hashes = [bytes([n]) * 16 for n in range(40)]
    forward = {hashes[row] for _, row in mixed([10], 3, [hashes])}
    backward = {hashes[::-1][row] for _, row in mixed([10], 3, [hashes[::-1]])}
    assert forward == backward
    assert forward != set(hashes[:10])


def test_without_weights_every_row_is_there_once(tmp_path: Path) -> None:
    run = run_stage(Mix(), tmp_path, sources(tmp_path, a=30, b=7))
    assert sorted(row["text"] for row in read_rows(run.result("data"))) == sorted(
        row["text"] for row in texts("a", 30) + texts("b", 7)
    )


def test_a_dataset_without_weight_is_absent(tmp_path: Path) -> None:
    run = run_stage(Mix(), tmp_path, sources(tmp_path, a=30, b=7, c=8), weights=[1, 0, 1])
    assert parts(run) == {"a": 8, "c": 8}


def test_stopping() -> None:
    assert counts_of([100, 30], [0.5, 0.5], Stop.FIRST_EXHAUSTED) == [30, 30]
    assert counts_of([100, 30], [0.5, 0.5], Stop.ALL_EXHAUSTED, repeat=True) == [100, 100]
    assert counts_of([10, 10, 10], [0.1, 0.2, 0.7], Stop.FIRST_EXHAUSTED) == [1, 3, 10]
    assert counts_of([100, 30], [], 13) == [10, 3]
    with pytest.raises(DataError, match="dataset 2 has too few rows") as caught:
        counts_of([100, 30], [1, 1], 80)
    assert caught.value.found == "30 rows of 40 that are wanted"
    assert counts_of([100, 30], [1, 1], 80, repeat=True) == [40, 40]


def test_repeated_rows_come_up_equally_often(tmp_path: Path) -> None:
    run = run_stage(
        Mix(), tmp_path, sources(tmp_path, a=4, b=20), weights=[1, 1], stop="all_exhausted", repeat=True
    )
    counts = Counter(row["text"] for row in read_rows(run.result("data")))
    assert sorted(counts.values()) == [1] * 20 + [5] * 4
    run = run_stage(Mix(), tmp_path / "b", sources(tmp_path, a=4), rows=6, repeat=True)
    assert sorted(Counter(row["text"] for row in read_rows(run.result("data"))).values()) == [1, 1, 2, 2]


@given(st.integers(0, 10_000), st.lists(st.integers(0, 1000), min_size=1, max_size=8).filter(any))
@settings(max_examples=60, deadline=None)
def test_parts_add_up_and_are_within_one_of_their_share(total: int, weights: list[int]) -> None:
    from fractions import Fraction

    shares = [Fraction(weight, sum(weights)) for weight in weights]
    counts = apportioned(total, shares)
    assert sum(counts) == total
    for count, share in zip(counts, shares, strict=True):
        assert abs(count - total * share) < 1
        assert share or not count


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 9)), min_size=1, max_size=5).filter(
        lambda each: any(weight for _, weight in each)
    )
)
@settings(max_examples=60, deadline=None)
def test_the_first_to_be_exhausted_gives_no_more_than_it_has(drawn: list[tuple[int, int]]) -> None:
    sizes, weights = zip(*drawn, strict=True)
    counts = counts_of(sizes, weights, Stop.FIRST_EXHAUSTED)
    assert all(count <= size for count, size in zip(counts, sizes, strict=True))
    everything = counts_of(sizes, weights, Stop.ALL_EXHAUSTED, repeat=True)
    assert all(
        count >= size for count, size, weight in zip(everything, sizes, weights, strict=True) if weight
    )


def test_the_source_of_a_row_can_be_told(tmp_path: Path) -> None:
    inputs = sources(tmp_path, a=3, b=3)
    run = run_stage(Mix(), tmp_path, inputs, names=["x", "y"], source_column="from")
    assert all(row["from"] == {"a": "x", "b": "y"}[row["text"][0]] for row in read_rows(run.result("data")))
    assert run.outcome is not None
    assert run.outcome.figures == {"rows": 6.0, "rows.x": 3.0, "rows.y": 3.0}
    with pytest.raises(DataError, match="a column `text` already"):
        run_stage(Mix(), tmp_path / "b", inputs, source_column="text")


def test_different_formats_are_refused(tmp_path: Path) -> None:
    inputs = sources(tmp_path, a=3)
    inputs["data"].append(dataset(tmp_path / "p", [{"prompt": "a"}], "prompt"))
    with pytest.raises(DataError, match=r"different formats, prompt, text; `data\.convert`"):
        run_stage(Mix(), tmp_path / "x", inputs)
    assert parts(run_stage(Mix(), tmp_path / "y", inputs, weights=[1, 0])) == {"a": 3}


def known(*facts: DatasetFacts) -> dict[str, list[Input]]:
    return {"data": [Input("load.data", Kind.DATASET, each) for each in facts]}


def test_the_plan_counts_and_refuses() -> None:
    stage = Mix()
    inputs = known(
        DatasetFacts(format="text", rows=100, policy="a"), DatasetFacts(format="text", rows=30, policy="b")
    )
    config = configured(stage, weights=[0.5, 0.5])
    assert stage.predict(config, inputs)["data"].facts == DatasetFacts(format="text", rows=60)
    assert list(stage.check(config, inputs)) == []
    problems = {
        "2 weights for 1 datasets": (config, known(DatasetFacts(format="text"))),
        "different formats": (config, known(DatasetFacts(format="text"), DatasetFacts(format="prompt"))),
        "dataset 2 has too few rows": (configured(stage, weights=[1, 1], rows=80), inputs),
    }
    for message, (options, wrong) in problems.items():
        (finding,) = stage.check(options, wrong)
        assert finding.level is Level.ERROR
        assert message in finding.message


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"weights": [-1, 2]}, "negative"),
        ({"weights": [0, 0]}, "above 0"),
        ({"weights": [1, 1], "stop": "all_exhausted"}, "repeat: true"),
        ({"names": ["a", "a"]}, "two datasets the same"),
        ({"names": ["a"], "weights": [1, 2]}, "1 names and 2 weights"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigProblems) as caught:
        configured(Mix(), **options)
    assert part in str([problem.message for problem in caught.value.problems])
