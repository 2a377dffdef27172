"""`data.contamination` and `posttrain data contamination`: evaluation rows in training data."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
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
from posttrain_plugins.data.similarity.exposure import Exposure, RowSet, exposures
from posttrain_plugins.data.similarity.overlap import Measure

Row = dict[str, Any]


def text(seed: int, count: int = 30) -> str:
    chosen = random.Random(seed)
    return " ".join(f"w{chosen.randrange(5000)}" for _ in range(count))


def part(told: str, start: int, count: int) -> str:
    return " ".join(told.split()[start : start + count])


def asks(*prompts: str) -> list[Row]:
    return [{"prompt": prompt} for prompt in prompts]


def answers(*pairs: tuple[str, str]) -> list[Row]:
    return [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]


def compared(
    training: Sequence[Row],
    evaluation: Sequence[Row],
    formats: tuple[str, str] = ("prompt_completion", "prompt"),
    **measure: Any,
) -> Exposure:
    sets = [
        RowSet(name, format, lambda rows=rows: rows)
        for name, format, rows in zip(("train", "test"), formats, (training, evaluation), strict=True)
    ]
    return exposures(sets[:1], sets[1:], Measure(**measure))


def hits(*arguments: Any, **measure: Any) -> dict[int, tuple[int, int, float]]:
    """For each evaluation row that is hit: the training row, the longest overlap, the coverage."""
    (found,) = compared(*arguments, **measure).evaluations
    return {row: (hit.row, hit.longest, round(hit.coverage, 4)) for (row, _), hit in found.hits.items()}


# What counts as an overlap

ASKED = text(1)


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        ((f"see: {part(ASKED, 4, 13)} so", "yes"), {0: (0, 13, 0.4333)}),
        ((f"see: {part(ASKED, 4, 12)} so", "yes"), {}),
        (("tell me", f"gladly {part(ASKED, 10, 20)}"), {0: (0, 20, 0.6667)}),
        ((part(ASKED, 0, 15), f"gap {part(ASKED, 15, 15)}"), {0: (0, 15, 1.0)}),
        ((part(ASKED, 0, 10), part(ASKED, 10, 10)), {0: (0, 20, 0.6667)}),  # the same words in a row
        ((ASKED.upper().replace(" ", ", "), "!"), {0: (0, 30, 1.0)}),
    ],
)
def test_thirteen_words_in_a_row_are_an_overlap(
    training: tuple[str, str], expected: dict[int, tuple[int, int, float]]
) -> None:
    assert hits(answers(("nothing", "here"), training)[1:], asks(ASKED)) == expected


def test_the_longest_overlap_of_a_training_set_is_told_with_its_row() -> None:
    training = answers(
        (part(ASKED, 0, 14), "a"), ("b", part(ASKED, 5, 22)), (text(2), "c"), (part(ASKED, 1, 13), "d")
    )
    exposure = compared(training, asks(text(3), ASKED))
    (found,) = exposure.evaluations
    ((where, hit),) = found.hits.items()
    assert where == (1, 0)
    assert (hit.row, hit.rows, hit.longest) == (1, 3, 22)
    assert hit.text == part(ASKED, 5, 22)
    assert exposure.overlapping == [frozenset({0, 1, 3})]
    assert (found.share, exposure.worst, exposure.trained) == (0.5, 0.5, [4])


def test_words_that_follow_each_other_in_one_row_alone_are_no_longer_overlap() -> None:
    """Both halves are there, the other way round: the longest run is one of them."""
    training = answers((f"{part(ASKED, 15, 15)} {part(ASKED, 0, 15)}", "x"))
    assert hits(training, asks(ASKED)) == {0: (0, 15, 1.0)}


def test_coverage_is_of_the_words_in_common_runs() -> None:
    training = answers((part(ASKED, 0, 9), part(ASKED, 20, 8)))  # 17 of 30 words, in runs of 8
    assert hits(training, asks(ASKED), ngram=8, coverage=0.5) == {0: (0, 9, 0.5667)}
    assert hits(training, asks(ASKED), ngram=8, coverage=0.6) == {}


def test_coverage_does_not_add_up_over_training_rows() -> None:
    training = answers((part(ASKED, 0, 12), "x"), (part(ASKED, 12, 12), "x"))
    assert hits(training, asks(ASKED), ngram=8, coverage=0.5) == {}
    assert hits(training, asks(ASKED), ngram=8, coverage=0.4) == {0: (0, 12, 0.4)}


@pytest.mark.parametrize(
    ("training", "hit"),
    [
        (("first: what is two plus two? then more", "x"), True),
        (("x", "you may ask what is two, plus two"), True),
        (("what is two plus three", "x"), False),
        (("what is two", "plus two"), True),
    ],
)
def test_a_short_prompt_has_to_occur_as_a_whole(training: tuple[str, str], hit: bool) -> None:
    assert bool(hits(answers(training), asks("What is two plus two"))) is hit


@pytest.mark.parametrize(
    ("training", "hit"),
    [
        (("hello there", "x"), True),
        (("Hello, there!", "x"), True),
        (("say hello there", "x"), False),
        (("x", "hello there"), False),
    ],
)
def test_a_prompt_of_few_words_has_to_be_all_that_is_asked(training: tuple[str, str], hit: bool) -> None:
    assert bool(hits(answers(training), asks("hello there"))) is hit


def test_a_question_inside_of_a_conversation_counts() -> None:
    turns = [("user", "hi"), ("assistant", "ho"), ("user", "hello there"), ("assistant", "yes")]
    talk = [{"messages": [{"role": role, "content": told} for role, told in turns]}]
    formats = ("messages", "prompt")
    assert set(hits(talk, asks("hello there", "yes", "ho", "hi"), formats)) == {0, 3}


def test_instructions_that_all_rows_have_are_no_contamination() -> None:
    def talk(question: str) -> Row:
        return {
            "messages": [
                {"role": "system", "content": text(5, 40)},
                {"role": "user", "content": question},
                {"role": "assistant", "content": "yes"},
            ]
        }

    formats = ("messages", "messages")
    assert hits([talk(text(6))], [talk(text(7))], formats) == {}
    assert set(hits([talk(text(6))], [talk(text(7))], formats, on="row")) == {0}


def test_a_template_of_the_evaluation_is_no_contamination() -> None:
    frame = text(8, 20)
    evaluation = asks(*(f"{frame} {text(100 + n, 5)}" for n in range(12)))
    training = answers((f"{frame} and so on", "x"), (evaluation[3]["prompt"], "x"))
    assert hits(training, evaluation) == {3: (1, 25, 1.0)}  # which is the whole prompt
    tail = part(
        evaluation[3]["prompt"], 7, 18
    )  # 13 words of the frame are a template, 5 runs reach beyond it
    assert hits(answers((tail, "x")), evaluation) == {3: (0, 17, 0.68)}
    assert len(hits(training, evaluation, common=12)) == 12
    assert len(hits(training, evaluation, common=None)) == 12


def test_rows_that_are_all_template_are_still_compared_as_a_whole_and_counted() -> None:
    evaluation = asks(*[text(9)] * 12, text(10))
    exposure = compared(answers((text(9), "x")), evaluation)
    (found,) = exposure.evaluations
    assert found.contaminated == frozenset(range(12))
    assert (found.unjudged, found.wordless) == (12, 0)
    assert compared(answers((f"so: {text(9)}", "x")), evaluation).evaluations[0].hits == {}


def test_rows_without_words_are_counted_and_nothing_else() -> None:
    picture = {"prompt": [{"role": "user", "content": [{"type": "image"}]}]}
    (found,) = compared(
        [{"prompt": picture["prompt"], "completion": "x"}], [picture, *asks("hello there")]
    ).evaluations
    assert (found.hits, found.wordless, found.unjudged) == ({}, 1, 1)


def test_symbols_are_words_where_there_are_no_others() -> None:
    assert set(hits(answers(("+-*/%", "x")), asks("+ - * / %", "+ + +"))) == {0}


def test_texts_without_spaces_are_compared_by_character() -> None:
    asked = "小明有三个苹果和五个梨子一共有多少水果"
    assert hits(answers((f"题目：{asked}？", "八")), asks(asked)) == {0: (0, 19, 1.0)}


@pytest.mark.parametrize(
    ("on", "found"), [("prompt", set()), ("row", {0}), ("answer", {0}), ("completion", set())]
)
def test_another_part_of_the_row_may_be_looked_for(on: str, found: set[int]) -> None:
    evaluation = [{"prompt": text(11), "completion": text(12), "answer": ASKED}]
    training = answers(("ask", ASKED if on == "answer" else text(12, 30)))
    if on == "completion":
        training = answers(("ask", text(13)))
    assert set(hits(training, evaluation, ("prompt_completion",) * 2, on=on)) == found


def test_a_column_that_is_missing_is_named_with_the_row() -> None:
    with pytest.raises(DataError, match="row 2: a row has no column `answer`"):
        compared(answers(("a", "b")), [{"prompt": "a", "answer": "b"}, {"prompt": "b"}], on="answer")


def test_preference_pairs_are_compared_on_both_sides() -> None:
    training = [{"prompt": "ask", "chosen": text(14), "rejected": f"no: {ASKED}"}]
    assert set(hits(training, asks(ASKED), ("preference", "prompt"))) == {0}


def test_every_training_set_is_compared_with_every_evaluation_set() -> None:
    def rows(name: str, format: str, given: list[Row]) -> RowSet:
        return RowSet(name, format, lambda: given)

    training = [
        rows("one", "prompt_completion", answers((text(1), "x"), (text(2), "x"))),
        rows("two", "text", [{"text": f"{text(2)} {text(3)}"}]),
    ]
    evaluation = [rows("a", "prompt", asks(text(1), text(2))), rows("b", "prompt", asks(text(3), text(4)))]
    found = exposures(training, evaluation, Measure())
    assert {each.name: set(each.hits) for each in found.evaluations} == {
        "a": {(0, 0), (1, 0), (1, 1)},
        "b": {(0, 1)},
    }
    assert found.evaluations[0].as_dict(found.names)["training"] == {"one": 2, "two": 1}
    assert found.worst == 1.0


def test_nothing_to_compare_is_an_error() -> None:
    some = RowSet("some", "prompt", lambda: asks("a"))
    for training, evaluation, told in (([], [some], "training"), ([some], [], "evaluation")):
        with pytest.raises(DataError, match=f"there is no {told} set"):
            exposures(training, evaluation, Measure())
    with pytest.raises(DataError, match="the evaluation set has no rows"):
        exposures([some], [RowSet("none", "prompt", lambda: [])], Measure())


def test_it_agrees_with_counting_by_hand_on_random_words() -> None:
    """Few different words, so that runs of four are common by chance."""
    chosen = random.Random(0)

    def told(count: int) -> list[str]:
        return [chosen.choice("abcdefg") for _ in range(count)]

    asked, taught = [told(chosen.randrange(5, 12)) for _ in range(30)], [told(25) for _ in range(30)]
    found = hits(
        [{"text": " ".join(each)} for each in taught],
        asks(*map(" ".join, asked)),
        ("text", "prompt"),
        ngram=4,
        shortest=4,
        common=None,
    )
    expected = {}
    for place, own in enumerate(asked):
        longest = max(_common_run(own, other) for other in taught)
        if longest >= 4:
            expected[place] = longest
    assert 3 < len(expected) < 30
    assert {place: longest for place, (_, longest, _) in found.items()} == expected


def _common_run(one: list[str], other: list[str]) -> int:
    """The longest run of words in both, by dynamic programming."""
    best, before = 0, [0] * (len(other) + 1)
    for word in one:
        after = [0]
        for index, each in enumerate(other):
            after.append(before[index] + 1 if each == word else 0)
        best, before = max(best, *after), after
    return best


# The stage


def loaded(directory: Path, rows: Sequence[Row]) -> Artifact:
    directory.mkdir(parents=True)
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_stage(Load(), directory, path="rows.jsonl").result("data")


TRAINING = answers((f"please: {text(20)}", "yes"), (text(21), "no"), ("hello there", "well"))
EVALUATION = asks(text(20), text(22), "hello there", text(23))


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


def some(origin: str) -> Input:
    return Input(origin, Kind.DATASET, Load().predict(configured(Load(), path="gone.csv"), {})["data"].facts)


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
    assert wrong.code == 1 and "there is neither a file nor a dataset of that name" in wrong.err


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
