from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.stages import configured, contents, run_stage

from posttrain.errors import DataError
from posttrain.registry.components import ConfigProblems
from posttrain_plugins.data.generators.characters import (
    Addition,
    AdditionConfig,
    Reverse,
    ReverseConfig,
    ReversePairs,
    StringsConfig,
)
from posttrain_plugins.data.generators.steps import RunningSum, RunningSumConfig
from posttrain_plugins.data.rows import read_rows
from posttrain_plugins.data.synthetic import Synthetic


def test_reverse_rows_are_right_and_distinct() -> None:
    config = ReverseConfig(min_length=1, max_length=3, alphabet="ab")
    rows = list(Reverse()(config, 14, seed=1))
    prompts = [row["prompt"][0]["content"] for row in rows]
    assert sorted(prompts) == sorted(
        ["a", "b", "aa", "ab", "ba", "bb", "aaa", "aab", "aba", "abb", "baa", "bab", "bba", "bbb"]
    )
    assert all(row["answer"] == row["completion"][0]["content"] for row in rows)
    assert all(row["answer"] == prompt[::-1] for row, prompt in zip(rows, prompts, strict=True))


def test_pairs_to_reverse_are_right_and_nearly_right() -> None:
    config = StringsConfig(min_length=1, max_length=4, alphabet="ab")
    rows = list(ReversePairs()(config, 30, seed=1))
    for row in rows:
        right, nearly = row["chosen"][0]["content"], row["rejected"][0]["content"]
        assert right == row["answer"] == row["prompt"][0]["content"][::-1]
        assert nearly != right
        if len(set(right)) == 1:
            assert nearly == right + right[0]
        else:
            swapped = [at for at in range(len(right)) if right[at] != nearly[at]]
            assert len(swapped) == 2 and swapped[1] == swapped[0] + 1 and sorted(right) == sorted(nearly)


def test_addition_writes_digits_lowest_first() -> None:
    rows = list(Addition()(AdditionConfig(digits=2), 10_000, seed=0))
    sums = {row["prompt"][0]["content"]: row["answer"] for row in rows}
    assert len(sums) == 10_000
    assert sums["21+43"] == "64"  # 12 + 34 = 46
    assert sums["99+10"] == "001"  # 99 + 1 = 100
    assert sums["00+00"] == "0"


@pytest.mark.parametrize("base", [10, 4])
def test_a_running_sum_is_right_up_to_its_slip(base: int) -> None:
    rows = list(RunningSum()(RunningSumConfig(careless=0.5, base=base), 300, seed=0))
    assert len({row["prompt"][0]["content"] for row in rows}) == 300
    for row in rows:
        terms, total = [int(term) for term in row["prompt"][0]["content"].split("+")], 0
        right = []
        for at, (step, label) in enumerate(zip(row["completions"], row["labels"], strict=True), 1):
            left, written = step.split("=")
            total = sum(terms[: at + 1]) % base
            assert max(terms[at], int(written)) < base
            assert label == (int(written) == total)
            if at > 1:
                assert left == f"{row['completions'][at - 2].split('=')[1]}+{terms[at]}"
            right.append(label)
        assert right == sorted(right, reverse=True)
        assert row["answer"] == str(total)
    assert 0.3 < sum(all(row["labels"]) for row in rows) / 300 < 0.7


def test_running_sums_run_out() -> None:
    with pytest.raises(DataError, match="no more different prompts"):
        list(RunningSum()(RunningSumConfig(min_terms=2, max_terms=2), 101, 0))


@pytest.mark.parametrize(
    ("generator", "config"),
    [
        (Reverse(), ReverseConfig()),
        (ReversePairs(), StringsConfig()),
        (Addition(), AdditionConfig()),
        (RunningSum(), RunningSumConfig()),
    ],
)
def test_rows_depend_on_the_seed_alone(generator: Any, config: Any) -> None:
    first, again, other = (list(generator(config, 50, seed)) for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_a_small_space_is_refused_by_name() -> None:
    with pytest.raises(DataError, match="`addition` cannot make 101 different prompts") as caught:
        list(Addition()(AdditionConfig(digits=1), 101, 0))
    assert caught.value.found == "100 possible prompts"
    (finding,) = Synthetic().check(
        configured(Synthetic(), generator={"name": "reverse", "max_length": 3, "alphabet": "ab"}, rows=20), {}
    )
    assert "cannot make 20 different prompts" in finding.message
    assert "8 possible prompts" in finding.message


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"min_length": 4, "max_length": 3}, "above max_length"),
        ({"alphabet": "aa"}, "twice"),
        ({"alphabet": "a b"}, "white space"),
        ({"alphabet": ""}, "alphabet"),
    ],
)
def test_generator_options_that_make_no_sense(options: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigProblems) as caught:
        configured(Synthetic(), generator={"name": "reverse", **options}, rows=3)
    assert part in str([(problem.path, problem.message) for problem in caught.value.problems])


def test_the_stage_writes_what_it_predicted(tmp_path: Path) -> None:
    options = {"generator": "reverse", "rows": 100, "seed": 3, "split": {"test": 0.2}}
    stage, config = Synthetic(), configured(Synthetic(), **options)
    run = run_stage(stage, tmp_path, **options)
    predicted = stage.predict(config, {})
    for port in stage.outputs(config):
        assert predicted[port.name].facts == run.described[port.name][1]
        written = (run.output(port.name) / "prompts.txt").read_text().split()
        assert stage.prompts(config, port.name, tmp_path) == set(written)
        assert port.formats == {"prompt_completion"}
    train, test = (
        {row["prompt"][0]["content"] for row in read_rows(run.result(port))} for port in ("train", "test")
    )
    assert train.isdisjoint(test)
    assert len(train) + len(test) == 100


def test_two_runs_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        run_stage(Synthetic(), tmp_path / name, generator={"name": "addition", "digits": 1}, rows=20)
    assert contents(tmp_path / "a" / "out-data") == contents(tmp_path / "b" / "out-data")
