"""Arguments of TRL on the command line: taken where they mean the same, told what takes their place where not."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.contexts import catalogue
from helpers.planning import command

from posttrain.contracts.registration import Group
from posttrain.planning.overrides import assign
from posttrain.planning.source import read
from posttrain.registry.components import ConfigProblems, validate_config
from posttrain_plugins.commands.arguments import described
from posttrain_plugins.commands.synonyms import COMMANDS, EXACT, SYNONYMS, known, known_options
from posttrain_plugins.commands.wording import flagged
from posttrain_plugins.training.elsewhere import ELSEWHERE

CLASSES = {
    "transformers": {"training_args.py": "TrainingArguments"},
    "trl": {
        "trainer/sft_config.py": "SFTConfig",
        "trainer/dpo_config.py": "DPOConfig",
        "trainer/kto_config.py": "KTOConfig",
        "trainer/reward_config.py": "RewardConfig",
        "trainer/model_config.py": "ModelConfig",
        "scripts/utils.py": "ScriptArguments",
        "experimental/cpo/cpo_config.py": "CPOConfig",
        "experimental/orpo/orpo_config.py": "ORPOConfig",
        "experimental/tpo/tpo_config.py": "TPOConfig",
    },
}
OWN = {"model_name_or_path", "dataset_name", "output_dir"}
"""Those that the command itself takes."""
TRAINERS = [catalogue().stage(name) for name in catalogue().names(Group.TRAINER)]
OPTIONS = {name for trainer in TRAINERS for name in described(trainer.config)}
LOSSES = {
    f"loss.{option}"
    for name in catalogue().names(Group.LOSS)
    for option in catalogue().load(Group.LOSS, name).config.model_fields
}
LOADERS = {
    f"{name}.{option}"
    for name, stage in {"model": "model.load", "dataset": "data.load"}.items()
    for option in catalogue().stage(stage).config.model_fields
}


def arguments(package: str, file: str, name: str) -> list[str]:
    """Read the fields of a class of arguments without importing anything."""
    found = importlib.util.find_spec(package)
    assert found is not None and found.origin is not None
    tree = ast.parse((Path(found.origin).parent / file).read_text(encoding="utf-8"))
    (made,) = [each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == name]
    fields = [each.target.id for each in made.body if isinstance(each, ast.AnnAssign)]  # type: ignore[union-attr]
    assert len(fields) > 5
    return fields


@pytest.mark.parametrize(
    ("package", "file", "name"),
    [(package, file, name) for package, files in CLASSES.items() for file, name in files.items()],
    ids=lambda value: value if value.isidentifier() else "",
)
def test_every_argument_has_an_answer(package: str, file: str, name: str) -> None:
    known = OWN | OPTIONS | SYNONYMS.keys() | ELSEWHERE.keys() | COMMANDS.keys()
    assert [each for each in arguments(package, file, name) if each not in known] == []


def test_synonyms_are_of_options() -> None:
    assert set(SYNONYMS.values()) <= OPTIONS | LOSSES | LOADERS
    assert not SYNONYMS.keys() & OPTIONS


def said(hint: str) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for option in re.findall(r"`(\w+: [^`]+)`", hint):
        for name, value in read(option, "hint").data.items():
            assign(tree, (name,), value, "hint")
    return tree


def models() -> Iterator[Any]:
    yield from (trainer.config for trainer in TRAINERS)
    yield catalogue().stage("data.load").config


@pytest.mark.parametrize("name", [name for name, hint in ELSEWHERE.items() if said(hint)])
def test_what_takes_the_place_of_others_is_valid(name: str) -> None:
    given = said(ELSEWHERE[name])
    required = {"eval_steps": 1} if given.keys() & {"load_best_model_at_end"} else {}
    problems = []
    for model in models():
        path = {"path": "x"} if "path" in model.model_fields else {}
        try:
            validate_config(model, {**required, **path, **given}, catalogue())
            break
        except ConfigProblems as error:
            problems.append(str(error))
    else:
        pytest.fail("\n".join(problems))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("it is `lora: {r: 16, alpha: 32}`", "it is `--lora.r 16 --lora.alpha 32`"),
        ("`loss: [sigmoid, sft]`", "`--loss sigmoid sft`"),
        ("`backend: {name: ddp, ranks: 2}`", "`--backend ddp --backend.ranks 2`"),
        ("`callbacks: [{name: bema, every: 2}]`", "`--callbacks '{name: bema, every: 2}'`"),
        ("`quantization: {}`, `bf16: true`", "`--quantization '{}'`, `--bf16`"),
        ("`data.pack` and `train.sft`", "`data.pack` and `train.sft`"),
    ],
)
def test_options_of_a_file_as_options_of_a_command(text: str, expected: str) -> None:
    assert flagged(text) == expected


def test_all_that_is_unknown_is_told_at_once() -> None:
    words = ["--report_to", "wandb", "--eval_strategy", "steps", "--torch_dtype", "bfloat16", "--packing"]
    words += ["--attn_implementation", "sdpa", "--per_device_train_batch_size", "4", "--learning_rat", "1"]
    told = command("dpo", "--model", "org/m", "--dataset", "org/d", "--model.revisio", "1", *words)
    assert told.code == 2
    for name in [word for word in words if word.startswith("--")] + ["--model.revisio"]:
        assert name in told.err
    for hint in (
        "`--callbacks wandb`",
        "`--batch_size 4`",
        "`--bf16`",
        "did you mean `--learning_rate`?",
        "did you mean `--model.revision`?",
    ):
        assert hint in told.err
    assert "{" not in told.err, "no option is told as a file spells it"


def test_what_means_the_same_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "more.yaml").write_text("use_dora: true\nlora_r: 4\nmodel_revision: abc\n", encoding="utf-8")
    words = ["--model_name_or_path", "org/m", "--dataset_name", "org/d", "--dataset_config", "main"]
    words += [
        "--lora_r=8",
        "--lora-alpha",
        "32",
        "--lora_target_modules",
        "q_proj",
        "v_proj",
        "--beta",
        "0.3",
    ]
    words += ["--loss_type", "ipo", "--config", "more.yaml"]
    told = command("dpo", *words, "--print")
    assert told.code == 0, told.err
    found = read(told.out, "printed").data["stages"]
    assert found["model"]["with"] == {"id": "org/m", "revision": "abc"}
    assert found["data"]["with"] == {"id": "org/d", "subset": "main"}
    assert found["train"]["with"] == {
        "lora": {"dora": True, "r": 8, "alpha": 32, "target_modules": ["q_proj", "v_proj"]},
        "loss": {"name": "ipo", "beta": 0.3},
    }


def test_an_option_goes_to_each_of_several_losses_that_has_it() -> None:
    words = [
        "--model_name_or_path",
        "org/m",
        "--dataset_name",
        "org/d",
        "--loss_type",
        "sigmoid",
        "bco_pair",
        "sft",
    ]
    told = command("dpo", *words, "--loss_weights", "0.8", "0.2", "1.0", "--beta", "0.2", "--print")
    assert told.code == 0, told.err
    assert read(told.out, "printed").data["stages"]["train"]["with"] == {
        "loss": [{"name": "sigmoid", "beta": 0.2}, {"name": "bco_pair", "beta": 0.2}, "sft"],
        "loss_weights": [0.8, 0.2, 1.0],
    }
    one = command("dpo", *words, "--loss.0.beta", "0.3", "--print")
    assert read(one.out, "printed").data["stages"]["train"]["with"]["loss"][:2] == [
        {"name": "sigmoid", "beta": 0.3},
        "bco_pair",
    ]
    none = command("dpo", *words, "--discopop_tau", "0.1", "--print")
    assert none.code == 2 and "none of these has an option `discopop_tau`" in none.err, none.err


def test_an_option_of_a_trainer_is_none_of_something_else() -> None:
    assert known(["--beta=0.3", "--lora-r", "8"], {"beta"}) == ["--beta=0.3", "--lora.r", "8"]
    assert known_options({"beta": 0.3, "lora_r": 8}, {"beta"}) == {"beta": 0.3, "lora.r": 8}


def test_the_page_names_every_synonym() -> None:
    page = (Path(__file__).parents[2] / "docs" / "commands.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `--(\w+)` \| `--([\w.]+)` \|$", page, re.MULTILINE))
    assert rows == {"model_name_or_path": "model", "dataset_name": "dataset", **SYNONYMS}
    assert set(re.findall(r"^\| `--(\w+)[^`]*` beside|^\| `--(\w+)[^`]*` \|", page, re.MULTILINE))
    assert all(f"| `--{name}" in page for name in EXACT), "those that mean the same with some values, too"
