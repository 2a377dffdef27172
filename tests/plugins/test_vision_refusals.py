"""Rows with images where they cannot be used, and models that are loaded and judged with them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from helpers.contexts import FakeContext, catalogue, configured
from helpers.models import as_artifact
from helpers.training import train
from helpers.vision import FAMILIES, picture, write_model
from helpers.vision_runs import IMAGE, PROCESSOR_FILES, SIZES, context, sft_rows, user

from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.passage import Passage
from posttrain.errors import DataError
from posttrain_plugins.data.images.gallery import Gallery
from posttrain_plugins.data.images.image import Image
from posttrain_plugins.evaluation.likelihood import completion_nll
from posttrain_plugins.models.artifact import facts_of
from posttrain_plugins.models.loading import run as load_run
from posttrain_plugins.models.policy import open_policy


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    directory = write_model(tmp_path_factory.mktemp(request.param), request.param)
    return as_artifact(directory, facts_of(directory))


def test_images_for_a_model_without_eyes(tmp_path: Path) -> None:
    from helpers.training import model_artifact

    blind = model_artifact(tmp_path / "model")
    given = context(
        tmp_path, "train.sft", blind, sft_rows(tmp_path / "data"), "prompt_completion", max_steps=1
    )
    with pytest.raises(
        DataError, match=r"6 row\(s\): the row has images, but the model takes none \(rows 1, 2, "
    ):
        train(given)


def test_a_placeholder_in_a_message_is_text(tmp_path: Path) -> None:
    """In a row without images it would take the features of another row's image."""
    directory = write_model(tmp_path / "model", "llava")
    model = as_artifact(directory, facts_of(directory))
    rows = sft_rows(tmp_path / "data")
    rows[2]["prompt"] = [user("What is <image>?")]
    given = context(tmp_path, "train.sft", model, rows, "prompt_completion", max_steps=1)
    train(given)
    assert any("'<image>'" in note for note in given.notes), given.notes


def test_a_placeholder_in_a_string(tmp_path: Path) -> None:
    """Strings say where their images are by it, so there must be as many."""
    directory = write_model(tmp_path / "model", "llava")
    model = as_artifact(directory, facts_of(directory))
    name = Gallery(tmp_path / "data").take(picture(30, 30))
    rows = [{"prompt": "USER: <image>?", "completion": "A cat", "images": [name]}] * 4
    train(context(tmp_path, "train.sft", model, rows, "prompt_completion", max_steps=1))
    rows = [*rows, {"prompt": "USER: <image>?", "completion": "A cat"}]
    given = context(tmp_path / "other", "train.sft", model, rows, "prompt_completion", max_steps=1)
    shutil.copytree(tmp_path / "data" / "images", given.input("data").path / "images")
    with pytest.raises(DataError, match=r"row 5\b.*not as many places for images"):
        train(given)


def test_rows_whose_images_would_be_cut_are_left_out(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", "llava")
    model = as_artifact(directory, facts_of(directory))
    given = context(
        tmp_path,
        "train.sft",
        model,
        sft_rows(tmp_path / "data"),
        "prompt_completion",
        max_steps=1,
        max_length=20,
    )
    train(given)
    assert any("cut an image" in note for note in given.notes), given.notes


def test_a_model_is_loaded_with_its_processor(tmp_path: Path) -> None:
    """Also where its weights are written anew, in another precision."""
    write_model(tmp_path / "source", "smolvlm")
    stage = catalogue().stage("model.load")
    for name, options in {"as-it-is": {}, "narrowed": {"dtype": "bfloat16"}}.items():
        given = FakeContext(tmp_path / name, stage, configured(stage, path="../source", **options), {})
        load_run(given)
        loaded = given.result("model")
        for file in PROCESSOR_FILES:
            assert (loaded.path / file).read_bytes() == (tmp_path / "source" / file).read_bytes()
        assert type(open_policy(loaded, given).model).__name__ == "SmolVLMForConditionalGeneration"


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_evaluations_refuse_images(family: str, tmp_path: Path) -> None:
    """Rather than read a placeholder as a word."""
    directory = write_model(tmp_path / "model", family)
    model = as_artifact(directory, facts_of(directory))
    policy = open_policy(model, FakeContext(tmp_path, None, None, {"model": [model]}))
    encoder, prompt = policy.encoder, [user(IMAGE, "What?")]
    for encode in (lambda: encoder.encode_prompt(prompt), lambda: encoder.encode_pair(prompt, "A cat")):
        with pytest.raises(DataError, match="only trainers are given the images"):
            encode()


def test_likelihood_of_rows_with_images(tmp_path: Path) -> None:
    """Where sequences come with their images they are scored as in training."""
    directory = write_model(tmp_path / "model", "llava")
    model = as_artifact(directory, facts_of(directory))
    policy = open_policy(model, FakeContext(tmp_path, None, None, {"model": [model]}))
    images = [Image.of(Gallery(tmp_path).take(picture(*SIZES[seed], seed)), tmp_path) for seed in (0, 1)]
    passages = [
        Passage(
            "completion", [user(IMAGE, "What?")], [{"role": "assistant", "content": "A cat"}], images=[image]
        )
        for image in images
    ]
    first, second = completion_nll(policy, policy.encoder.encode(passages), batch_tokens=512)
    (alone,) = completion_nll(policy, policy.encoder.encode(passages[1:]), batch_tokens=512)
    assert second[0] == pytest.approx(alone[0], abs=1e-4) and abs(first[0] - second[0]) > 0.01
