"""Ratings of answers from who beat whom."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from helpers.contexts import catalogue, configured
from helpers.stages import run_stage
from helpers.training import dataset_artifact

from posttrain.artifacts.kinds import DatasetFacts, Kind
from posttrain.contracts.stage import Input
from posttrain.errors import DataError
from posttrain.registry.problems import ConfigProblems
from posttrain_plugins.data.elo import Elo
from posttrain_plugins.data.formats import format_of
from posttrain_plugins.data.ratings import ratings
from posttrain_plugins.data.rows import read_rows


def pair(chosen: str, rejected: str, prompt: str = "q", **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **more}


def rated(tmp_path: Path, rows: list[dict[str, Any]], **options: Any) -> list[dict[str, Any]]:
    source = dataset_artifact(tmp_path / "data", rows, "preference")
    run = run_stage(Elo(), tmp_path, {"data": [source]}, **options)
    assert run.described["data"][1].format == "ranked"
    found = read_rows(run.output("data"))
    assert all(format_of("ranked").problem(row) is None for row in found)
    return found


def test_two_answers_are_worked_by_hand():
    """By symmetry they are θ and −θ, with σ(2θ) + 2p σ(θ) = 1 + p: as many wins as there were, real and imagined."""
    for prior in (0.5, 2.0):
        first, second = ratings({(0, 1): 1.0}, 2, prior)
        assert first == pytest.approx(-second)
        sigmoid = [1 / (1 + math.exp(-x)) for x in (2 * first, first)]
        assert sigmoid[0] + 2 * prior * sigmoid[1] == pytest.approx(1 + prior, abs=1e-8)


def test_ratings_are_the_most_likely_ones():
    """No single rating can be moved without losing likelihood."""
    wins = {(0, 1): 3.0, (1, 0): 1.0, (1, 2): 2.0, (3, 2): 1.0, (0, 3): 1.0}
    found = ratings(wins, 4, 0.5)

    def likelihood(of: list[float]) -> float:
        beaten = [(of[i] - of[j], count) for (i, j), count in wins.items()]
        imagined = [(sign * rating, 0.5) for rating in of for sign in (1, -1)]
        return -sum(count * math.log1p(math.exp(-gap)) for gap, count in (*beaten, *imagined))

    best = likelihood(found)
    for player in range(4):
        for step in (0.01, -0.01):
            moved = [rating + step * (place == player) for place, rating in enumerate(found)]
            assert likelihood(moved) < best


def test_who_always_wins_is_best_and_finite_and_who_was_never_compared_is_average():
    best, middle, worst, alone = ratings({(0, 1): 100.0, (1, 2): 100.0}, 4, 0.5)
    assert best > middle > worst
    assert math.isfinite(best) and math.isfinite(worst)
    assert alone == pytest.approx(0.0, abs=1e-9)
    extreme = ratings({(0, 1): 1e7, (1, 2): 1e-3}, 3, 1e-6)
    assert extreme == sorted(extreme, reverse=True) and all(map(math.isfinite, extreme))


def test_a_stronger_prior_pulls_towards_the_middle():
    weak, strong = (ratings({(0, 1): 5.0}, 2, prior)[0] for prior in (0.1, 10.0))
    assert weak > strong > 0


def test_answers_of_a_prompt_become_a_ranking(tmp_path: Path):
    rows = [
        pair("a", "b"),
        pair("b", "c"),
        pair("a", "c"),
        pair("x", "y", "other"),
        pair("same", "same"),
    ]
    first, second = rated(tmp_path, rows)
    assert first["completions"] == ["a", "b", "c"] and second["completions"] == ["x", "y"]
    assert first["scores"] == sorted(first["scores"], reverse=True)
    assert first["scores"][1] == pytest.approx(0.0, abs=1e-9)
    assert second["scores"][0] == pytest.approx(-second["scores"][1]) and second["scores"][0] > 0


def test_the_same_question_with_other_tools_is_another_one(tmp_path: Path):
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    found = rated(tmp_path, [pair("a", "b"), pair("a", "c", tools=tools)])
    assert [row["completions"] for row in found] == [["a", "b"], ["a", "c"]]
    assert found[1]["tools"] == tools


def test_scales_differ_by_a_factor(tmp_path: Path):
    (logit,) = rated(tmp_path / "logit", [pair("a", "b")])
    (elo,) = rated(tmp_path / "elo", [pair("a", "b")], scale="elo")
    assert elo["scores"][0] == pytest.approx(logit["scores"][0] * 400 / math.log(10))


def test_wins_are_counted_by_a_column(tmp_path: Path):
    (counted,) = rated(tmp_path / "counted", [pair("a", "b", n=3)], wins_column="n")
    (repeated,) = rated(tmp_path / "repeated", [pair("a", "b", n=1)] * 3)
    assert counted["scores"] == pytest.approx(repeated["scores"])
    for bad in ("3", -1, True):
        with pytest.raises(DataError, match="how often") as caught:
            rated(tmp_path / str(bad), [pair("a", "b", n=1), pair("a", "b", n=bad)], wins_column="n")
        assert caught.value.where == "row 2"


def test_the_order_of_rows_changes_no_rating(tmp_path: Path):
    rows = [pair("a", "b"), pair("b", "c"), pair("c", "a"), pair("a", "c")]
    one = dict(
        zip(*(rated(tmp_path / "one", rows)[0][name] for name in ("completions", "scores")), strict=True)
    )
    (other,) = rated(tmp_path / "other", rows[::-1])
    for answer, score in zip(other["completions"], other["scores"], strict=True):
        assert score == pytest.approx(one[answer], abs=1e-8)


def test_nothing_to_rate_by_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="no pair to rate"):
        rated(tmp_path, [pair("same", "same")])
    stage = catalogue().stage("data.elo")
    data = Input(
        "d", Kind.DATASET, DatasetFacts(format="preference", columns=("prompt", "chosen", "rejected"))
    )
    (finding,) = stage.check(configured(stage, wins_column="n"), {"data": (data,)})
    assert "`n`" in finding.message
    assert not list(stage.check(configured(stage), {"data": (data,)}))


@pytest.mark.parametrize("options", [{"prior": 0}, {"prior": -1}, {"scale": "points"}, {"wins_column": ""}])
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]):
    with pytest.raises(ConfigProblems):
        configured(catalogue().stage("data.elo"), **options)
