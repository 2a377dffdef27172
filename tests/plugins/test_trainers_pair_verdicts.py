"""What rows of pairs say beside which answer is better: read where a loss needs it, refused where it is missing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.contexts import catalogue, configured
from helpers.training import context_for, model_artifact, preference_rows, train

from posttrain.artifacts.kinds import DatasetFacts, Kind, PolicyFacts
from posttrain.contracts.loss import Loss, Need
from posttrain.contracts.stage import Input
from posttrain.errors import DataError, PluginError
from posttrain_plugins.losses.preference.nash_md import NashMd
from posttrain_plugins.losses.preference.xpo import Xpo
from posttrain_plugins.losses.reward.bradley_terry import BradleyTerry
from posttrain_plugins.testing.draws import make_batch
from posttrain_plugins.trainers.dpo import Dpo

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


class Plain(Dpo):
    """Passes rows on as they are."""

    def rows(self, rows: Any, format: Any, needs: Any, seed: int) -> Any:
        return rows


class Lengths(Plain):
    """Says something else of a row in numbers."""

    def verdicts(self, row: Any, format: Any, needs: Any) -> Sequence[float]:
        return (float(len(row["chosen"])),)


def stepped(directory: Path, trainer: type[Dpo], loss: str) -> Any:
    context = context_for(
        directory, "train.dpo", model_artifact(directory / "model"), preference_rows(4), "preference",
        loss=loss, max_steps=1, batch_size=4,
    )  # fmt: skip
    context.stage = trainer()
    train(context)
    return context


def test_a_trainer_with_rows_of_its_own_reads_the_columns_too(tmp_path: Path) -> None:
    own, built_in = (stepped(tmp_path / each.__name__, each, "xpo").losses for each in (Plain, Dpo))
    assert own == built_in


def test_numbers_of_a_trainer_of_ones_own_are_never_taken_for_the_columns(tmp_path: Path) -> None:
    own, built_in = (stepped(tmp_path / each.__name__, each, "sigmoid").losses for each in (Lengths, Dpo))
    assert own == built_in
    with pytest.raises(PluginError, match="do not say what the loss needs of pairs") as caught:
        stepped(tmp_path / "xpo", Lengths, "xpo")
    assert caught.value.found == "1 numbers"


@pytest.mark.parametrize(
    ("loss", "need"),
    [(Xpo, Need.AUTHORS), (NashMd, Need.AUTHORS), (NashMd, Need.PREFERENCE), (BradleyTerry, Need.MARGIN)],
)
def test_a_batch_without_what_a_loss_needs_is_told(loss: type[Loss], need: Need) -> None:
    batch = make_batch(loss.family, needs=loss.needs - {need})
    with pytest.raises(PluginError, match="the batch does not hold") as caught:
        loss()(batch, loss.config(), {}, {})
    assert f"`Need.{need.name}`" in str(caught.value.fix)
