"""The stage and the command that compare training rows with evaluation rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.overlaps import EVALUATION, TRAINING, Row, answers, some, text
from helpers.planning import command
from helpers.stages import StageRun, configured, run_stage

from posttrain.artifacts.kinds import Kind
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.stage import Input, Level, Verdict
from posttrain.errors import DataError
from posttrain.pipeline import Pipeline
from posttrain.registry.components import ConfigProblems
from posttrain_plugins.data.contamination import Contamination
from posttrain_plugins.data.load import Load
from posttrain_plugins.data.rows import read_rows

# The stage


def loaded(directory: Path, rows: Sequence[Row]) -> Artifact:
    directory.mkdir(parents=True)
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_stage(Load(), directory, path="rows.jsonl").result("data")


def ran(directory: Path, training: Sequence[Row] = TRAINING, **options: Any) -> StageRun:
    inputs = {
        "train": [loaded(directory / "train", training)],
        "evaluation": [loaded(directory / "test", EVALUATION)],
    }
    return run_stage(Contamination(), directory, inputs, **options)


def test_the_stage_reports_what_it_found(tmp_path: Path) -> None:
    run = ran(tmp_path)
    assert run.outcome is not None and run.outcome.verdict is Verdict.COMPLETED
    figures = {"contaminated": 0.5, "rows": 4.0, "contaminated_rows": 2.0}
    assert run.outcome.figures == figures
    kind, facts = run.described["report"]
    assert kind is Kind.REPORT and facts.report == "contamination" and facts.figures == figures
    train, test = (run.inputs[port][0].ref for port in ("train", "evaluation"))
    report = json.loads((run.output("report") / "report.json").read_text())
    assert report["training"] == {train: 3} and report["overlapping"] == {train: 2}
    assert report["evaluations"][test] == {
        "rows": 4,
        "contaminated": 2,
        "share": 0.5,
        "longest": 30,
        "training": {train: 2},
        "compared_as_a_whole": 1,
        "without_words": 0,
    }
    lines = (run.output("report") / "hits.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {
            "evaluation": test, "row": 1, "dataset": train, "training_row": 1, "training_rows": 1,
            "longest": 30, "coverage": 1.0, "text": text(20),
        },
        {
            "evaluation": test, "row": 3, "dataset": train, "training_row": 3, "training_rows": 1,
            "longest": 2, "coverage": 1.0, "text": "hello there",
        },
    ]  # fmt: skip
    assert [told for _, told in run.said] == [
        f"1 rows of {test} are too short, or too alike, for runs of words; they count only where a training row "
        "asks just the same"
    ]


@pytest.mark.parametrize(("most", "verdict"), [(0.5, Verdict.COMPLETED), (0.49, Verdict.REJECTED)])
def test_too_much_of_it_is_rejected(tmp_path: Path, most: float, verdict: Verdict) -> None:
    run = ran(tmp_path, max_share=most)
    assert run.outcome is not None and run.outcome.verdict is verdict
    assert ("more than" in run.outcome.summary) is (verdict is Verdict.REJECTED)


def test_training_rows_that_overlap_none_are_put_out(tmp_path: Path) -> None:
    run = ran(tmp_path, remove=True)
    assert read_rows(run.result("clean")) == [TRAINING[1]]
    assert run.outcome is not None and run.outcome.figures["removed"] == 2.0
    predicted = Contamination().predict(
        run.config, {"train": [Input("a.data", Kind.DATASET, run.inputs["train"][0].facts)], "evaluation": []}
    )
    assert predicted["clean"].facts.format == "prompt_completion" and predicted["clean"].facts.rows is None


def test_a_training_set_of_which_nothing_is_left_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="every training row overlaps"):
        ran(tmp_path, TRAINING[:1], remove=True)


def test_several_evaluation_sets_have_a_figure_each(tmp_path: Path) -> None:
    train = loaded(tmp_path / "train", TRAINING)
    tests = [loaded(tmp_path / f"test{n}", rows) for n, rows in enumerate((EVALUATION[:1], EVALUATION[1:]))]
    run = run_stage(Contamination(), tmp_path, {"train": [train], "evaluation": [*tests, tests[0]]})
    assert run.outcome is not None
    assert run.outcome.figures == {
        "contaminated": 1.0,
        "rows": 4.0,
        "contaminated_rows": 2.0,
        f"contaminated[{tests[0].digest[:8]}]": 1.0,
        f"contaminated[{tests[1].digest[:8]}]": pytest.approx(1 / 3),
    }


def test_the_plan_refuses_what_makes_no_sense() -> None:
    stage = Contamination()
    facts = Contamination().predict(configured(stage, remove=True), {"train": [some("a.x")]})["clean"].facts
    inputs = {"train": [some("a.x"), some("b.x")], "evaluation": [some("a.x"), some("c.x")]}
    told = [finding.message for finding in stage.check(configured(stage, remove=True), inputs)]
    assert told == [
        "`remove` cleans one training set, but there are 2",
        "a.x is a training set and an evaluation set",
    ]
    assert all(each.level is Level.ERROR for each in stage.check(configured(stage), inputs))
    assert facts.format is None


@pytest.mark.parametrize("options", [{"shortest": 14}, {"ngram": 0}, {"coverage": 2}, {"max_share": -1}])
def test_impossible_options_are_refused(options: Row) -> None:
    with pytest.raises(ConfigProblems):
        configured(Contamination(), **options)


# The command


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, rows in (("train", TRAINING), ("test", EVALUATION)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


FILES = ("--train", "train.jsonl", "--evaluation", "test.jsonl")


def test_the_command_compares_files(here: Path) -> None:
    told = command("data", "contamination", *FILES, "--output", "hits.jsonl", "--clean", "clean.jsonl")
    assert told.code == 0, told.err
    assert "test.jsonl row 1 is in train.jsonl row 1: 30 words, 100%" in told.out
    assert told.out.rstrip().endswith("in training data: 2 of 4 rows of test.jsonl (50.00%)")
    assert len((here / "hits.jsonl").read_text().splitlines()) == 2
    assert [json.loads(line) for line in (here / "clean.jsonl").read_text().splitlines()] == TRAINING[1:2]


def test_the_command_fails_above_the_limit(here: Path) -> None:
    assert command("data", "contamination", *FILES, "--max", "0.5").code == 0
    over = command("data", "contamination", *FILES, "--max", "0.4", "--json")
    assert over.code == 1
    answer = json.loads(over.out)
    assert answer["worst"] == 0.5 and answer["unread"] == []
    assert [(hit["row"], hit["training_row"]) for hit in answer["hits"]] == [(1, 1), (3, 3)]


PIPELINE = {
    "stages": {
        "rows": {"uses": "data.load", "with": {"path": "train.jsonl"}},
        "split": {"uses": "data.split", "inputs": {"data": "rows"}, "with": {"split": {"test": 0.5}}},
        "asked": {"uses": "data.load", "with": {"path": "test.jsonl"}},
        "base": {
            "uses": "model.init",
            "inputs": {"data": ["rows", "asked"]},
            "with": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        },
        "sft": {
            "uses": "train.sft",
            "inputs": {"model": "base", "data": "split.train"},
            "with": {"max_steps": 1},
        },
        "pairs": {
            "uses": "data.best_of_n",
            "inputs": {"model": "sft", "prompts": "asked"},
            "with": {"reward": "exact", "n": 2},
        },
        "dpo": {
            "uses": "train.dpo",
            "inputs": {"model": "sft", "data": "pairs"},
            "with": {"max_steps": 1},
        },
        "eval": {
            "uses": "evaluate",
            "inputs": {"models": ["sft"], "data": "asked"},
            "with": {"answer_column": "prompt"},
        },
    }
}


def test_the_command_finds_the_datasets_of_a_pipeline_before_it_ran(here: Path) -> None:
    (here / "chain.yaml").write_text(json.dumps(PIPELINE))
    told = command("data", "contamination", "chain.yaml", "--json")
    assert told.code == 0, told.err
    answer = json.loads(told.out)
    assert set(answer["training"]) == {"split.train"}
    assert set(answer["evaluations"]) == {"asked.data"}
    assert answer["unread"] == ["pairs.pairs"]
    trained = command("data", "split", "train.jsonl", "--test", "0.5", "--output", "parts", "--json")
    by_file = command(
        "data", "contamination", "--train", "parts/train.jsonl", "--evaluation", "test.jsonl", "--json"
    )
    assert trained.code == by_file.code == 0
    assert answer["worst"] == json.loads(by_file.out)["worst"]
    left = [path.name for path in (here / ".posttrain").iterdir()]
    assert "runs" not in left and not any(name.startswith("datasets-") for name in left)


def test_a_limit_is_not_judged_on_half_of_the_data(here: Path) -> None:
    (here / "chain.yaml").write_text(json.dumps(PIPELINE))
    told = command("data", "contamination", "chain.yaml", "--max", "1")
    assert told.code == 2 and "pairs.pairs" in told.err and "--only" in told.err
    shown = command("data", "contamination", "chain.yaml")
    assert shown.code == 0 and "not compared, since it is not made yet: pairs.pairs" in shown.err


def test_datasets_of_the_store_are_used_by_reference_and_by_digest(here: Path) -> None:
    stages = {name: PIPELINE["stages"][name] for name in ("rows", "asked")}
    (here / "data.yaml").write_text(json.dumps({"stages": stages}))
    run = Pipeline.from_file("data.yaml").run(runner="inline", track=False)
    digest = run.results["asked"].outputs["data"]
    arguments = ["--train", f"{run.run}:rows.data", "--evaluation", digest[:16], "--json"]
    answer = json.loads(command("data", "contamination", *arguments).out)
    assert answer["worst"] == 0.5
    wrong = command("data", "contamination", "--train", f"{run.run}:rows.test", *FILES[2:])
    assert wrong.code == 2 and "there is neither a file nor a dataset of that name" in wrong.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "there is no training set to compare"),
        (["--train", "train.jsonl"], "there is no evaluation set to compare"),
        ([*FILES, "--ngram", "0"], "ngram: Input should be greater than or equal to 1"),
        ([*FILES, "--train", "test.jsonl", "--clean", "c.jsonl"], "`--clean` needs a single training set"),
        ([*FILES, "--output", "train.jsonl"], "the output is there already"),
        (["gone.yaml", *FILES], "gone.yaml"),
    ],
)
def test_the_command_says_what_is_wrong(here: Path, arguments: list[str], told: str) -> None:
    result = command("data", "contamination", *arguments)
    assert result.code in (1, 2)
    assert told in result.err and "Traceback" not in result.err


# All three stages in a pipeline


def chain(most: float) -> Pipeline:
    return Pipeline(
        {
            "rows": {"uses": "data.load", "with": {"path": "train.jsonl"}},
            "asked": {"uses": "data.load", "with": {"path": "test.jsonl"}},
            "unique": {"uses": "data.dedup", "inputs": {"data": "rows"}},
            "overlap": {
                "uses": "data.contamination",
                "inputs": {"train": ["unique.data"], "evaluation": ["asked"]},
                "with": {"max_share": most, "remove": True},
            },
            "parts": {
                "uses": "data.split",
                "inputs": {"data": "overlap.clean"},
                "with": {"split": {"test": 0.5}},
            },
        }
    )


def test_the_stages_work_together_and_are_cached(here: Path) -> None:
    rows = [*TRAINING, *answers(*((text(n), text(n + 500)) for n in range(100, 120))), TRAINING[1]]
    (here / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = chain(0.5).run(runner="inline", track=False)
    assert run.status == "completed"
    figures = {name: dict(result.figures) for name, result in run.results.items()}
    assert (figures["unique"]["rows"], figures["unique"]["kept"]) == (24, 23)
    assert figures["overlap"]["removed"] == 2
    assert figures["parts"]["rows.train"] + figures["parts"]["rows.test"] == 21
    assert chain(0.5).plan().nothing_to_do


def test_what_depends_on_a_rejected_comparison_does_not_run(here: Path) -> None:
    run = chain(0.4).run(runner="inline", track=False)
    assert run.status == "rejected"
    assert run.results["overlap"].status.value == "rejected" and not run.results["parts"].outputs
