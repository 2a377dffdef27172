"""What a training command says: in options of the command line, never in key paths of a pipeline that nobody wrote."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.contexts import catalogue
from helpers.planning import command
from helpers.training import preference_rows

from posttrain.contracts.registration import Group
from posttrain.errors import DataError, PosttrainError
from posttrain.planning.problems import SpecProblems
from posttrain_plugins.commands.direct import Wording
from posttrain_plugins.commands.synonyms import EXACT, known
from posttrain_plugins.data.problems import Problems
from posttrain_plugins.training.elsewhere import ELSEWHERE

TRAINERS = catalogue().names(Group.TRAINER)


def wording(uses: str = "train.dpo") -> Wording:
    loaders = {name: catalogue().stage("data.load").config for name in ("data", "eval")}
    loaders["model"] = catalogue().stage("model.load").config
    return Wording("posttrain dpo", catalogue().stage(uses).config, loaders)


def said(error: PosttrainError) -> PosttrainError:
    with pytest.raises(PosttrainError) as caught, wording().spoken():
        raise error
    return caught.value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("stages.train.with.loss.beta", "--loss.beta"),
        ("stages.data.with.columns", "--dataset.columns"),
        ("`stages.train.with`", "posttrain dpo"),
        ("data.data has the format", "--dataset has the format"),
        ("use `lora: {r: 16}`", "use `--lora.r 16`"),
        ("`columns: {question: prompt}`", "`--dataset.columns '{question: prompt}'`"),
        ("`drop_duplicates: true` of `data.load`", "`--dataset.drop_duplicates` of `data.load`"),
        ("set `download: true`", "set `--download`"),
        ("with `to: unpaired_preference`", "with `to: unpaired_preference`"),
        ("prompt_completion: `prompt`, `completion`; text: `text`", None),
        ("`data.load` and `a: b: c`, model.data.x", None),
    ],
)
def test_texts_are_told_in_options(text: str, expected: str | None) -> None:
    assert wording().text(text) == (text if expected is None else expected)


@pytest.mark.parametrize(
    "text", ["`posttrain resume r1`", "posttrain resume", "`posttrain resume` goes on from it"]
)
def test_a_run_that_is_to_copy_its_model_is_not_resumed(text: str) -> None:
    assert wording().text(text) == text
    told = replace(wording(), copies=True).voice.word(text)
    assert told.startswith("the same command again") and "resume" not in told


def test_all_parts_of_an_error_are_told_in_options() -> None:
    told = said(DataError("x", where="data", fix="leave them out with `skip_invalid: true`, or mind `limit`"))
    assert (told.where, told.fix) == (
        "--dataset",
        "leave them out with `--dataset.skip_invalid`, or mind `--dataset.limit`",
    )
    several = said(
        SpecProblems([DataError("x", where="stages.eval.with.limit"), DataError("y", where="train")])
    )
    assert isinstance(several, SpecProblems)
    assert [each.where for each in several.problems] == ["--eval_dataset.limit", "posttrain dpo"]


@pytest.mark.parametrize("uses", TRAINERS)
@pytest.mark.parametrize("name", ["learning_rate", "batch_size", "max_length"])
def test_a_bound_is_told_with_its_option(here: Path, uses: str, name: str) -> None:
    told = command("train", uses, "--model", "m.gguf", "--dataset", "d.jsonl", f"--{name}", "-5")
    first = told.err[told.err.index("error: ") :]
    assert told.code == 2 and first.startswith(f"error: --{name}: "), told.err
    for part in ("greater than", "fix: "):
        assert part in first
    assert "stages." not in told.err


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"")
    lines = [json.dumps(row) + "\n" for row in preference_rows(4)]
    (tmp_path / "d.jsonl").write_text("".join(lines), encoding="utf-8")
    return tmp_path


def test_unknown_options_do_not_hide_wrong_values_nor_what_is_missing(here: Path) -> None:
    told = command("dpo", "--bta", "0.1", "--learning_rate", "abc", "--loss.beta", "0")
    assert told.code == 2
    for part in (
        "did you mean `--loss.beta`?",
        "--learning_rate: ",
        "--loss.beta: ",
        "--model: ",
        "--dataset: ",
    ):
        assert part in told.err


@pytest.mark.parametrize("name", ["margin", "reward_model_path"])
def test_nothing_unlike_is_suggested(here: Path, name: str) -> None:
    assert "did you mean" not in command("dpo", "--model", "m.gguf", f"--{name}", "1").err


def test_losses_of_the_trainers_family_alone_are_suggested(here: Path) -> None:
    told = command("dpo", "--model", "m.gguf", "--dataset", "d.jsonl", "--loss_type", "kto_pair").err
    assert "sigmoid" in told and "plackett_luce" not in told and "focal" not in told


def test_a_hub_id_that_is_not_here_is_refused_before_anything_starts(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(here / "hub"))
    words = ("dpo", "--model", "org/none", "--dataset", "d.jsonl")
    told = command(*words)
    assert told.code == 2 and "--model: this model of the hub is not in the local cache" in told.err
    assert "`--download`" in told.err and not (here / ".posttrain" / "runs").exists()


def test_a_misspelt_column_is_renamed_first(here: Path) -> None:
    text = (here / "d.jsonl").read_text(encoding="utf-8").replace('"rejected"', '"reject"')
    (here / "d.jsonl").write_text(text, encoding="utf-8")
    told = command("dpo", "--model", "m.gguf", "--dataset", "d.jsonl").err
    assert "fix: rename what is misspelt: `--dataset.columns '{reject: rejected}'`" in told
    assert "data: data:" not in told


@pytest.mark.parametrize(
    ("verb", "format", "example"),
    [
        (
            "dpo",
            "preference: `prompt`, `chosen`, `rejected`;",
            "{question: prompt, better: chosen, worse: rejected}",
        ),
        (
            "kto",
            "unpaired_preference: `prompt`, `completion`, `label`",
            "{question: prompt, answer: completion, good: label}",
        ),
        (
            "sft",
            "text: `text`; messages: `messages`; prompt_completion",
            "{question: prompt, answer: completion}",
        ),
    ],
)
def test_columns_of_no_format_are_told_of_those_that_the_trainer_takes(
    here: Path, verb: str, format: str, example: str
) -> None:
    (here / "d.jsonl").write_text('{"question": "a", "first": "b", "second": "c"}\n', encoding="utf-8")
    told = command(verb, "--model", "m.gguf", "--dataset", "d.jsonl").err
    assert f"expected: what posttrain {verb} takes: {format}" in told
    assert f"`--dataset.columns '{example}'`" in told
    assert ("stepwise" in told, "alpaca" in told) == (False, verb == "sft")


def test_what_is_misspelt_is_misspelt_for_the_trainer(here: Path) -> None:
    (here / "d.jsonl").write_text('{"prompts": "a", "completion": "b", "labels": true}\n', encoding="utf-8")
    told = command("kto", "--model", "m.gguf", "--dataset", "d.jsonl").err
    assert "`--dataset.columns '{prompts: prompt, labels: label}'`" in told


def test_a_hint_that_all_lines_end_with_is_told_once() -> None:
    problems = Problems("rows")
    for place in ("line 1", "line 2"):
        problems.add(place, "`x` is bad; mend it")
    with pytest.raises(DataError) as caught:
        problems.check("or leave it")
    assert str(caught.value).count("mend it") == 1
    assert caught.value.fix == "mend it; or leave it"


@pytest.mark.parametrize(
    ("uses", "words", "expected"),
    [
        (
            "train.cpo",
            ("--loss", "simpo", "--simpo_gamma", "1.0"),
            ["--loss", "simpo", "--loss.gamma", "1.0"],
        ),
        ("train.cpo", ("--simpo_gamma", "1.0"), None),
        ("train.tpo", ("--loss=tpo_l", "--tpo_l_gamma", "0.5"), ["--loss=tpo_l", "--loss.gamma", "0.5"]),
        ("train.dpo", ("--truncation_mode", "keep_start"), ["--truncation", "keep_start"]),
        ("train.dpo", ("--truncation_mode", "keep_end"), None),
        ("train.dpo", ("--use_weighting",), ["--weighting", "wpo"]),
        ("train.dpo", ("--use_peft", "--lora_r", "4"), ["--lora.r", "4"]),
        ("train.dpo", ("--use_peft",), None),
        ("train.dpo", ("--disable_dropout", "true"), []),
        ("train.dpo", ("--disable_dropout", "false"), None),
        ("train.sft", ("--disable_dropout",), None),
        ("train.dpo", ("--precompute_ref_log_probs",), []),
        ("train.sft", ("--precompute_ref_log_probs",), None),
        ("train.dpo", ("--report_to", "none"), []),
        ("train.dpo", ("--report_to", "wandb"), None),
    ],
)
def test_what_means_exactly_one_thing_is_taken(uses: str, words: tuple[str, ...], expected: Any) -> None:
    own = catalogue().stage(uses).config.model_fields
    assert known(words, own, uses) == (list(words) if expected is None else expected)


def test_what_is_taken_with_some_values_has_an_answer_for_the_others() -> None:
    assert EXACT.keys() <= ELSEWHERE.keys()


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("--per_device_train_batch_size", "4"), "`--batch_size 4`"),
        (("--simpo_gamma", "1.0"), "`--loss simpo --loss.gamma 1.0`"),
        (("--lr", "3e-4"), "`--learning_rate 3e-4`"),
        (("--gradient_accumulation_steps", "2"), "counts all examples"),
    ],
)
def test_hints_have_the_users_number(here: Path, words: tuple[str, str], hint: str) -> None:
    told = command("dpo", "--model", "m.gguf", "--dataset", "d.jsonl", *words).err
    assert hint.replace("3e-4", "0.0003") in told or hint in told


def test_options_of_what_is_in_the_store_are_errors_of_options(here: Path) -> None:
    shutil.rmtree(here / ".posttrain", ignore_errors=True)
    (here / "stored").mkdir()
    (here / "stored" / "content.json").write_text("{}", encoding="utf-8")
    told = command("dpo", "--model", "m.gguf", "--dataset", "stored", "--dataset.limit", "3")
    assert (told.code, "taken as it is" in told.err) == (2, True)


def formats() -> Mapping[str, tuple[str, str, str]]:
    return {
        "pairs": ("train.kto", "preference", "`to: unpaired_preference`"),
        "scores": ("train.reward", "prompt_completion", "`format: scored`"),
        "labels": ("train.kto", "prompt_completion", "must be true or false"),
    }


@pytest.mark.parametrize("name", formats())
def test_another_format_is_told_with_the_way_to_the_right_one(name: str) -> None:
    from posttrain.artifacts.kinds import DatasetFacts, Kind
    from posttrain.contracts.rule import Site
    from posttrain.contracts.stage import Input
    from posttrain_plugins.handoffs.datasets import DatasetFormat

    uses, format, expected = formats()[name]
    columns = {"scores": ("prompt", "completion", "score"), "labels": ("prompt", "completion", "label")}
    facts = DatasetFacts(format=format, columns=columns.get(name, ("prompt", "chosen", "rejected")))
    stage = catalogue().stage(uses)
    site = Site("n", uses, stage, stage.config(), {"data": (Input("d.data", Kind.DATASET, facts),)}, {})
    (finding,) = DatasetFormat().check(site)
    assert expected in str(finding.fix)


def test_the_page_on_plugins_names_every_family_and_need() -> None:
    from posttrain.contracts.loss import Family, Need

    page = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text(encoding="utf-8")
    for name in (*(f"Family.{each.name}" for each in Family), *(f"Need.{each.name}" for each in Need)):
        assert f"`{name}`" in page
    for each in Family:
        assert f"| `{each.value}` | `" in page


def test_the_guide_names_every_canonical_format() -> None:
    from posttrain_plugins.data.formats import CANONICAL

    docs = Path(__file__).parents[2] / "docs"
    guide, data = ((docs / name).read_text(encoding="utf-8") for name in ("guide.md", "data.md"))
    assert all(f"\n| `{name}` | " in guide and f"\n| `{name}` | " in data for name in CANONICAL)
    assert f"in one of {('ten', 'eleven', 'twelve')[len(CANONICAL) - 10]}." in data


def test_of_what_reads_no_margin_no_margin_is_judged() -> None:
    from posttrain_plugins.data.formats import CANONICAL, format_of

    for name in CANONICAL:
        if name in ("preference", "scored"):
            row = {"prompt": "a", "chosen": "b", "rejected": "c", "completion": "d", "score": 1.0}
            assert format_of(name).problem({**row, "margin": "wide"}) is None
