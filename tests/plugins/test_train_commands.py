"""Training from the command line: options become a pipeline, and that pipeline is run as any other."""

from __future__ import annotations

import json
import shutil
import textwrap
from pathlib import Path
from typing import Any

import pytest
import typer
from helpers.contexts import catalogue
from helpers.models import save_tiny_model
from helpers.planning import Told, command
from helpers.stores import commit
from helpers.training import ROWS, completion_rows, preference_rows

from posttrain.artifacts.kinds import Kind, PolicyFacts
from posttrain.artifacts.store import Store
from posttrain.contracts.registration import Group
from posttrain.errors import SpecError
from posttrain.planning.source import read
from posttrain_plugins.commands.arguments import described, options
from posttrain_plugins.commands.spelling import spelled
from posttrain_plugins.commands.train import _copy


def parsed(uses: str, *words: str, **given: Any) -> dict[str, Any]:
    return options(catalogue().stage(uses).config, words, catalogue(), given)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a model and rows."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policy").mkdir()
    save_tiny_model(tmp_path / "policy")
    for name, rows in (("rows", completion_rows(20)), ("pairs", preference_rows(20))):
        lines = [json.dumps(row) + "\n" for row in rows]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return tmp_path


def printed(*words: str) -> dict[str, Any]:
    told = command(*words, "--print")
    assert told.code == 0, told.err
    data: dict[str, Any] = read(told.out, "printed").data
    return data


# Options


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--learning_rate", "2e-5"), {"learning_rate": 2e-5}),
        (("--learning-rate=2e-5",), {"learning_rate": 2e-5}),
        (("--lora.r", "16", "--lora.dropout", "0.1"), {"lora": {"r": 16, "dropout": 0.1}}),
        (("--bf16",), {"bf16": True}),
        (("--bf16", "false"), {"bf16": False}),
        (("--no_shuffle",), {"shuffle": False}),
        (("--max_steps", "-1"), {"max_steps": -1}),
        (("--micro_batch_tokens", "auto"), {"micro_batch_tokens": "auto"}),
        (("--micro_batch_tokens", "512"), {"micro_batch_tokens": 512}),
        (("--weight_column", "7"), {"weight_column": "7"}),
        (("--max_length", "null"), {"max_length": None}),
        (("--loss", "nll"), {"loss": "nll"}),
        (("--loss", "{name: nll}"), {"loss": {"name": "nll"}}),
        (("--callbacks", "bema"), {"callbacks": ["bema"]}),
        (("--callbacks", "bema", "divergence"), {"callbacks": ["bema", "divergence"]}),
        (("--callbacks.0.every", "5", "--callbacks", "bema"), {"callbacks": [{"name": "bema", "every": 5}]}),
        (("--lr_scheduler_kwargs.min_lr", "1e-6"), {"lr_scheduler_kwargs": {"min_lr": 1e-6}}),
        (("--learning_rate_groups", "{embed-x: 1e-5}"), {"learning_rate_groups": {"embed-x": 1e-5}}),
        (("--backend.ranks", "4", "--backend", "ddp"), {"backend": {"name": "ddp", "ranks": 4}}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_options_are_spelled_as_on_any_command_line(words: tuple[str, ...], expected: dict[str, Any]) -> None:
    assert parsed("train.sft", *words) == expected


@pytest.mark.parametrize(
    ("typed", "meant"),
    [(r"\n", "\n"), ("\n", "\n"), (r"\n\t", "\n\t"), (r"\\n", r"\n"), (r"\d", r"\d"), ("", "")],
)
def test_text_may_be_typed_as_the_help_shows_it(typed: str, meant: str) -> None:
    assert parsed("train.prm", "--step_separator", typed) == {"step_separator": meant}
    assert parsed("train.prm", step_separator=typed) == {"step_separator": typed}


def test_what_is_no_free_text_keeps_its_backslashes() -> None:
    assert parsed("data.load", "--images", r"pages\new") == {"images": r"pages\new"}
    pattern = r".*\\new"
    assert parsed("train.sft", "--lora.target_modules", pattern)["lora"] == {"target_modules": pattern}


def test_a_loss_and_its_options() -> None:
    assert parsed("train.dpo", "--loss.beta", "0.1", "--loss", "sigmoid") == {
        "loss": {"name": "sigmoid", "beta": 0.1}
    }


def test_the_command_line_beats_the_file() -> None:
    given = {"learning_rate": 1e-5, "lora.r": 4}
    assert parsed("train.sft", "--learning_rate", "2e-5", **given) == {
        "learning_rate": 2e-5,
        "lora": {"r": 4},
    }


@pytest.mark.parametrize(
    ("words", "message", "fix"),
    [
        (("--learning_rat", "1"), "there is no such option", "did you mean `--learning_rate`?"),
        (("--r", "16"), "there is no such option", "did you mean `--lora.r`?"),
        (("--lora_r", "16"), "there is no --lora_r", "it is `--lora.r 16`"),
        (("--gradient-accumulation-steps", "2"), "there is no --gradient-accumulation-steps", "batch_size"),
        (("--report_to", "wandb"), "there is no --report_to", "it is `--callbacks wandb`"),
        (("--report_to", "trackio", "wandb"), "there is no --report_to", "it is `--callbacks trackio wandb`"),
        (
            ("--report_to", "all"),
            "there is no --report_to",
            "it is `--callbacks tensorboard`, wandb or trackio",
        ),
        (("--learning_rate",), "needs a value", None),
        (("--learning_rate", "1", "2"), "takes one value", None),
        (("stray",), "this is no option", None),
        (("--learning_rate", ".inf"), "not finite", None),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_is_wrong_is_told(words: tuple[str, ...], message: str, fix: str | None) -> None:
    with pytest.raises(SpecError) as error:
        parsed("train.sft", *words)
    assert message in str(error.value)
    assert fix is None or fix in str(error.value.fix)


def test_an_option_of_the_loss_is_pointed_to() -> None:
    with pytest.raises(SpecError) as error:
        parsed("train.cpo", "--gamma", "0.1", "--loss", "simpo")
    assert str(error.value.fix) == "it is an option of the loss `simpo`: --loss.gamma"


@pytest.mark.parametrize("uses", catalogue().names(Group.TRAINER))
def test_every_option_of_every_trainer_can_be_given(uses: str) -> None:
    found = described(catalogue().stage(uses).config)
    assert {"learning_rate", "lora.r", "loss", "callbacks"} <= found.keys()
    assert all(about["description"] for about in found.values())


# Pipelines


def test_a_trainer_is_named_with_or_without_its_prefix(here: Path) -> None:
    words = ("--model", "policy", "--dataset", "rows.jsonl")
    assert printed("train", "sft", *words) == printed("train", "train.sft", *words)


def test_a_command_line_is_a_pipeline(here: Path) -> None:
    words = ("--model", "policy", "--dataset", "rows.jsonl", "--learning_rate", "2e-5", "--lora.r", "4")
    found = printed("sft", *words, "--eval_dataset", "rows.jsonl", "--gpus", "0", "--register", "assistant")
    assert found == {
        "name": "sft",
        "stages": {
            "model": {"uses": "model.load", "with": {"path": str(here / "policy")}},
            "data": {"uses": "data.load", "with": {"path": str(here / "rows.jsonl")}},
            "eval": {"uses": "data.load", "with": {"path": str(here / "rows.jsonl")}},
            "train": {
                "uses": "train.sft",
                "inputs": {"model": "model", "data": "data", "eval": "eval"},
                "with": {"learning_rate": 2e-5, "lora": {"r": 4}},
                "resources": {"gpus": 0},
            },
            "promote": {"uses": "promote", "inputs": {"model": "train.model"}, "with": {"name": "assistant"}},
        },
    }


@pytest.mark.parametrize("uses", catalogue().names(Group.TRAINER))
def test_every_trainer_has_the_same_command(here: Path, uses: str) -> None:
    made = next(ROWS[format] for format in ROWS if format in catalogue().stage(uses).formats)(20)
    lines = "".join(json.dumps(row) + "\n" for row in made)
    (here / "fitting.jsonl").write_text(lines, encoding="utf-8")
    words = ("--model", "policy", "--dataset", "fitting.jsonl", "--max_steps", "1")
    direct = printed(uses.removeprefix("train."), *words)
    assert direct == printed("train", uses, *words)
    assert direct["stages"]["train"]["uses"] == uses


def test_the_spellings_of_trl_and_a_config_file(here: Path) -> None:
    shutil.copy(here / "rows.jsonl", here / "others.jsonl")
    (here / "config.yaml").write_text(
        textwrap.dedent(
            """
            model_name_or_path: policy
            dataset_name: rows.jsonl
            learning_rate: 1.0e-5
            lora: {r: 4}
            """
        ),
        encoding="utf-8",
    )
    found = printed(
        "sft", "--config", "config.yaml", "--learning_rate", "2e-5", "--dataset_name", "others.jsonl"
    )
    assert found["stages"]["model"]["with"] == {"path": str(here / "policy")}
    assert found["stages"]["data"]["with"] == {"path": str(here / "others.jsonl")}
    assert found["stages"]["train"]["with"] == {"learning_rate": 2e-5, "lora": {"r": 4}}


def test_a_config_file_holds_any_option_of_the_command(here: Path) -> None:
    lines = "model: policy\ndataset: rows.jsonl\ncpus: 2\ngpus: 1\noutput_dir: null\nmodel.dtype: float32\n"
    (here / "config.yaml").write_text(f"{lines}dataset.limit: 5\n", encoding="utf-8")
    found = printed("sft", "--config", "config.yaml", "--gpus", "0", "--dataset.limit", "6")["stages"]
    assert found["model"]["with"] == {"path": str(here / "policy"), "dtype": "float32"}
    assert found["data"]["with"] == {"path": str(here / "rows.jsonl"), "limit": 6}
    assert found["train"]["resources"] == {"cpus": 2, "gpus": 0}
    assert (
        printed("sft", "--config", "config.yaml", "--cpus", "1")["stages"]["train"]["resources"]["cpus"] == 1
    )


@pytest.mark.parametrize(
    "line", ["download: 'no'", "download: 1", "output_dir: 3", "gpus: true", "cpus: 1.0", "model: 3"]
)
def test_a_config_file_with_a_value_of_another_type_is_refused(here: Path, line: str) -> None:
    (here / "config.yaml").write_text(line + "\n", encoding="utf-8")
    told = command("sft", "--config", "config.yaml", "--dataset", "rows.jsonl", "--print")
    assert told.code == 2
    assert f"config.yaml, {line.partition(':')[0]}: this value is of another type" in told.err


def test_values_behind_an_equals_sign_stay_as_they_are(here: Path) -> None:
    words = (
        "--model=org/model",
        "--dataset=org/data",
        "--model.revision=my-branch",
        "--eval-dataset=org/data",
    )
    found = printed("sft", *words, "--eval-dataset.source-split=my-part")["stages"]
    assert found["model"]["with"]["revision"] == "my-branch"
    assert found["eval"]["with"] == {"id": "org/data", "source_split": "my-part"}


def test_what_is_printed_runs_from_anywhere(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "bare.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    words = ("--model", "policy", "--model.template", "./bare.jinja", "--dataset", "rows.jsonl")
    found = command("sft", *words, "--max_steps", "1", "--print")
    assert found.code == 0, found.err
    elsewhere = here / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "printed.yaml").write_text(found.out, encoding="utf-8")
    monkeypatch.chdir(here.parent)
    assert command("plan", str(elsewhere / "printed.yaml")).code == 0
    for file in ("policy", "bare.jinja", "rows.jsonl"):
        assert str(here / file) in found.out


@pytest.mark.parametrize(
    "words",
    [("--learning_rate", "-1"), ("--loss", "sigmoid"), ("--max_length", "100000"), ("--eval_steps", "1")],
    ids=" ".join,
)
def test_what_would_be_refused_is_not_printed(here: Path, words: tuple[str, ...]) -> None:
    told = command("sft", "--model", "policy", "--dataset", "rows.jsonl", *words, "--print")
    assert (told.code, told.out) == (2, "")
    assert words[0].removeprefix("--") in told.err


def test_hub_ids_are_not_downloaded_unasked(here: Path) -> None:
    words = (
        "sft",
        "--model",
        "org/model",
        "--dataset",
        "org/data",
        "--dataset.subset",
        "main",
        "--model.revision",
        "1",
    )
    found = printed(*words)["stages"]
    assert found["model"] == {"uses": "model.load", "with": {"id": "org/model", "revision": "1"}}
    assert found["data"] == {"uses": "data.load", "with": {"id": "org/data", "subset": "main"}}
    assert printed(*words, "--download")["stages"]["model"]["with"]["download"] is True


def test_a_part_of_the_dataset_is_evaluated_on(here: Path) -> None:
    found = printed("sft", "--model", "policy", "--dataset", "rows.jsonl", "--dataset.split", "{test: 0.2}")
    assert found["stages"]["train"]["inputs"] == {"model": "model", "data": "data.train", "eval": "data.test"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("sft", "--dataset", "rows.jsonl"), "say which model to train"),
        (("sft", "--model", "policy"), "say which dataset to train on"),
        (
            ("sft", "--model", "policy", "--dataset", "rows.jsonl", "--eval_dataset.limit", "1"),
            "say which eval_dataset to evaluate on",
        ),
        (
            ("sft", "--model", "policy", "--dataset", "rows.jsonl", "--output_dir", "rows.jsonl"),
            "--output_dir: this is no directory",
        ),
        (("sft", "--model", "./nowhere", "--dataset", "rows.jsonl"), "there is no such file or directory"),
        (("sft", "--model", "nothing", "--dataset", "rows.jsonl"), "there is no model of that name"),
        (("train", "--model", "policy"), "name a trainer"),
        (("train", "sfd", "--model", "policy", "--dataset", "rows.jsonl"), "did you mean `train.sft`?"),
        (
            ("sft", "--model", "policy", "--dataset", "rows.jsonl", "--lr", "1"),
            "it is `--learning_rate 1`",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_a_command_lacks_is_told(here: Path, words: tuple[str, ...], expected: str) -> None:
    told = command(*words)
    assert told.code == 2, told.err
    assert expected in told.err


def test_help_shows_the_options_of_the_trainer(here: Path) -> None:
    told = command("dpo", "--help")
    assert told.code == 0
    for text in ("--model", "--learning_rate", "--lora.r", "--callbacks", "peak learning rate"):
        assert text in told.out
    assert "train.sft" in command("train", "--help").out


# Runs


def ran(*words: str) -> Told:
    told = command(*words, "--runner", "inline", "--quiet")
    assert told.code == 0, told.err
    return told


def test_a_model_takes_the_place_of_one_that_was_there(tmp_path: Path) -> None:
    workspace, out = tmp_path / ".posttrain", tmp_path / "out"
    payload = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"new"}
    artifact = commit(Store(workspace), payload, kind=Kind.ADAPTER, facts=PolicyFacts())
    out.mkdir()
    for name in ("model.safetensors", "model-00001-of-00002.safetensors", "chat_template.jinja", "notes.txt"):
        (out / name).write_text("old")
    _copy(artifact.digest, workspace, out)
    assert {path.name: path.read_text() for path in out.iterdir()} == {
        "adapter_config.json": "{}",
        "adapter_model.safetensors": "new",
        "notes.txt": "old",
    }


def test_a_run_that_does_not_complete_says_how_the_model_gets_out(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: Any, **__: Any) -> Any:
        raise typer.Exit(130)

    monkeypatch.setattr("posttrain.cli.running.perform", stopped)
    told = command("sft", "--model", "policy", "--dataset", "rows.jsonl", "--output_dir", "out")
    assert told.code == 130
    assert "nothing was copied to out: the same command again" in told.out


@pytest.mark.slow
def test_a_command_trains_and_copies_the_model_out(here: Path) -> None:
    short = ("--max_steps", "1", "--batch_size", "4")
    words = ("sft", "--model", "policy", "--dataset", "rows.jsonl", *short, "--output_dir", "out")
    ran(*words)
    names = {path.name for path in (here / "out").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert "content.json" not in names
    again = command(*words)
    assert again.code == 2
    assert "the output directory is not empty" in again.err
    ran(*words, "--overwrite")
    found = printed("dpo", "--model", "train.model", "--dataset", "pairs.jsonl")
    assert found["stages"]["model"]["uses"] == "store.load"
    ran(
        "dpo",
        "--model",
        "sft:train.model",
        "--dataset",
        "pairs.jsonl",
        *short,
        "--lora.r",
        "2",
        "--output_dir",
        "two",
    )
    config = json.loads((here / "two" / "adapter_config.json").read_text())
    assert (Path(config["base_model_name_or_path"]) / "model.safetensors").is_file(), "peft finds the base"
    ran("dpo", "--model", "dpo:train.model", "--dataset", "data", *short, "--output_dir", "three")
    assert (here / "three" / "adapter_model.safetensors").is_file()
    ran("dpo", "--model", "two", "--dataset", "pairs.jsonl", *short, "--output_dir", "four")
    assert json.loads((here / "four" / "adapter_config.json").read_text())["r"] == 2
    ran("reward", "--model", "out", "--dataset", "pairs.jsonl", *short, "--output_dir", "judge")
    ran("reward", "--model", "judge", "--dataset", "pairs.jsonl", *short, "--output_dir", "judge2")
    assert (here / "judge2" / "values.json").is_file()


def test_plain_text_is_read_back_as_it_was() -> None:
    data = {
        "a b": {"x": [1, 2.5, True, None, "true", "1", "a: b", "ä"], "y": {}, "z": {"q": {"k": "v"}}},
        "n": -1e-7,
    }
    assert read(spelled(data), "text").data == data
