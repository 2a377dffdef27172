"""What rows of pairs say beside which answer is better: read where a loss needs it, refused where it is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.contexts import catalogue, configured
from helpers.training import context_for, model_artifact, preference_rows, train

from posttrain.artifacts.kinds import DatasetFacts, Kind, PolicyFacts
from posttrain.contracts.stage import Input
from posttrain.errors import DataError

LN2 = 0.6931


def rows(**changes: Any) -> list[dict[str, Any]]:
    return [{**row, **changes} for row in preference_rows(4)]


def step(directory: Path, loss: Any, given: list[dict[str, Any]]) -> Any:
    model = model_artifact(directory / "model")
    context = context_for(
        directory, "train.dpo", model, given, "preference", loss=loss, max_steps=1, batch_size=4
    )
    train(context)
    return context


def test_the_column_decides_whose_answer_is_made_unlikely(tmp_path: Path) -> None:
    """Chosen answers and rejected ones differ in length, so their log-probs do, and the loss at the start with them."""
    options = {"name": "xpo", "alpha": 0.01}
    contexts = [step(tmp_path / who, options, rows(chosen_by=who)) for who in ("policy", "reference")]
    for context, side in zip(contexts, ("rejected", "chosen"), strict=True):
        logp = context.seen_metrics[1][f"logps/{side}"]
        assert context.losses[0] == pytest.approx(LN2 + 0.01 * logp, abs=1e-3)
    assert contexts[0].losses[0] != pytest.approx(contexts[1].losses[0], abs=1e-3)


@pytest.mark.parametrize("kl", ["sequence", "token"])
def test_a_preference_pays_the_answer_of_the_policy(tmp_path: Path, kl: str) -> None:
    context = step(tmp_path, {"name": "nash_md", "kl": kl}, rows(chosen_by="reference", preference=0.75))
    assert context.losses[0] == pytest.approx(0.25 * context.seen_metrics[1]["logps/rejected"], abs=1e-3)


@pytest.mark.parametrize(
    ("loss", "changes", "message"),
    [
        ("xpo", {"chosen_by": "me"}, "`chosen_by` is neither `policy` nor `reference`"),
        ("xpo", {"chosen_by": True}, "`chosen_by` is neither"),
        ("nash_md", {"preference": 1.5}, "a probability is from 0 to 1"),
        ("nash_md", {"preference": "high"}, "`preference` is .*not true, false or a probability"),
    ],
)
def test_a_column_that_says_something_else_is_refused_by_row(
    tmp_path: Path, loss: str, changes: dict[str, Any], message: str
) -> None:
    given = preference_rows(4)
    given[2] |= changes
    with pytest.raises(DataError, match=message) as caught:
        step(tmp_path, loss, given)
    assert caught.value.where == "row 3"


def test_a_row_without_the_column_is_refused(tmp_path: Path) -> None:
    given = preference_rows(4)
    del given[3]["chosen_by"]
    with pytest.raises(DataError, match="the column `chosen_by` is missing"):
        step(tmp_path, "xpo", given)


def test_the_columns_mean_nothing_to_other_losses(tmp_path: Path) -> None:
    plain = [{name: row[name] for name in ("prompt", "chosen", "rejected")} for row in preference_rows(4)]
    odd = [{**row, "chosen_by": 3, "preference": "?"} for row in plain]
    one, other = (step(tmp_path / str(place), "sigmoid", given) for place, given in enumerate((plain, odd)))
    assert one.losses == other.losses


@pytest.mark.parametrize(
    ("loss", "columns", "format", "missing"),
    [
        ("xpo", ("prompt", "chosen", "rejected"), "preference", ["chosen_by"]),
        ("nash_md", ("prompt", "chosen", "rejected"), "preference", ["chosen_by", "preference"]),
        ("nash_md", ("prompt", "chosen", "rejected", "chosen_by"), "preference", ["preference"]),
        ("nash_md", None, "preference", []),
        ("xpo", None, "token_pairs", ["chosen_by"]),
        ("sigmoid", ("prompt", "chosen", "rejected"), "preference", []),
        (["sigmoid", "xpo"], ("prompt", "chosen", "rejected"), "preference", ["chosen_by"]),
    ],
)
def test_the_plan_knows_of_missing_columns(
    loss: Any, columns: tuple[str, ...] | None, format: str, missing: list[str]
) -> None:
    stage = catalogue().stage("train.dpo")
    inputs = {
        "model": [Input("base.model", Kind.MODEL, PolicyFacts())],
        "data": [Input("pairs.data", Kind.DATASET, DatasetFacts(format=format, columns=columns))],
    }
    found = [each.message for each in stage.check(configured(stage, loss=loss), inputs)]
    told = [text for text in found if "needs the column" in text]
    assert [text.split("`")[1] for text in told] == missing
