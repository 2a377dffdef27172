"""What images become in a token sequence: the family's own numbers, and nothing learned of them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from helpers.vision import FAMILIES, PLACEHOLDER, picture, write_model

from posttrain.errors import DataError
from posttrain_plugins.data.images.gallery import Gallery
from posttrain_plugins.data.images.image import Image
from posttrain_plugins.templates.encoder import Encoded, Encoder
from posttrain_plugins.templates.vision import Expansion, expansion_of

SIZES = [(28, 28), (56, 56), (57, 56), (29, 28), (3, 300), (300, 3), (1, 1)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: write_model(root / family, family) for family in FAMILIES}


def expansion(directory: Path) -> Expansion:
    found = expansion_of(directory)
    assert found is not None
    return found


def image(directory: Path, width: int, height: int, seed: int = 0) -> Image:
    return Image.of(Gallery(directory).take(picture(width, height, seed)), directory)


def patch(directory: Path, name: str, **changes: Any) -> None:
    path = directory / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def counted(family: str, features: Any) -> int:
    """How many tokens the model needs for what its image processor made."""
    if family.startswith("qwen"):
        return int(features["image_grid_thw"].prod()) // 4
    frames = features["pixel_values"].shape[-4]
    return frames * (16 if family == "llava" else 4)


@pytest.mark.parametrize("family", FAMILIES)
def test_as_many_tokens_as_the_processor_makes_features(
    family: str, models: dict[str, Path], tmp_path: Path
) -> None:
    from posttrain_plugins.training.pixels import processed

    chosen = random.Random(family)
    sizes = [(chosen.randint(1, 130), chosen.randint(1, 130)) for _ in range(40)] + SIZES
    for width, height in sizes:
        if max(width, height) > 200 * min(width, height):
            continue
        shown = image(tmp_path, width, height)
        block = expansion(models[family]).block(shown)
        found = block.count(expansion(models[family]).placeholder)
        assert found == counted(family, processed(models[family], shown.path)), (width, height)


def test_llava_gives_the_ids_of_its_own_processor(models: dict[str, Path], tmp_path: Path) -> None:
    from transformers import AutoTokenizer, CLIPImageProcessor, LlavaProcessor

    directory = models["llava"]
    own = LlavaProcessor(
        CLIPImageProcessor.from_pretrained(directory),
        AutoTokenizer.from_pretrained(directory),
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    text = "<|im_start|>user\nLook: <image> and <image>, compare<|im_end|>\n"
    pictures = [picture(40, 30, 1), picture(20, 60, 2)]
    expected = own(images=pictures, text=text)["input_ids"][0]
    plain = Encoder.open(directory).files.plain.encode(text, add_special_tokens=False).ids
    images = [Image.of(Gallery(tmp_path).take(each), tmp_path) for each in pictures]
    found = expansion(directory).expand(Encoded(list(plain), [True] * len(plain)), images)
    assert found.tokens == list(expected)


def test_idefics3_gives_the_ids_of_its_own_processor(models: dict[str, Path], tmp_path: Path) -> None:
    """The processor runs with an image processor of the kind that needs no torchvision."""
    from transformers import AutoTokenizer, Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    directory = models["idefics3"]
    own = Idefics3Processor(
        Idefics3ImageProcessorPil.from_pretrained(directory),
        AutoTokenizer.from_pretrained(directory),
        image_seq_len=4,
    )
    for seed, size in enumerate([(56, 56), (56, 20), (20, 56), (30, 29)]):
        text = "<|im_start|>user\nLook: <image> and compare<|im_end|>\n"
        shown = picture(*size, seed)
        expected = own(images=[[shown]], text=[text])["input_ids"][0]
        plain = Encoder.open(directory).files.plain.encode(text, add_special_tokens=False).ids
        images = [Image.of(Gallery(tmp_path).take(shown), tmp_path)]
        found = expansion(directory).expand(Encoded(list(plain), [True] * len(plain)), images)
        assert found.tokens == list(expected), size


def test_smolvlm_by_hand(models: dict[str, Path], tmp_path: Path) -> None:
    """56 × 28 pixels, tiles of 28: one row of two tiles, then the whole; (28 / 7)² / 2² = 4 tokens each."""
    block = expansion(models["smolvlm"]).block(image(tmp_path, 56, 28))
    plain = Encoder.open(models["smolvlm"]).files.plain
    assert plain.decode(list(block), skip_special_tokens=False) == (
        "<fake_token_around_image><row_1_col_1><image><image><image><image>"
        "<fake_token_around_image><row_1_col_2><image><image><image><image>\n"
        "\n<fake_token_around_image><global-img><image><image><image><image><fake_token_around_image>"
    )


def test_one_tile_is_no_tile(models: dict[str, Path], tmp_path: Path) -> None:
    """Without splitting only the whole image is shown."""
    directory = write_model(tmp_path / "whole", "smolvlm")
    patch(directory, "preprocessor_config.json", do_image_splitting=False)
    block = expansion(directory).block(image(tmp_path, 56, 28))
    plain = Encoder.open(directory).files.plain
    assert plain.decode(list(block), skip_special_tokens=False) == (
        "<fake_token_around_image><global-img><image><image><image><image><fake_token_around_image>"
    )


def test_qwen_by_hand(models: dict[str, Path], tmp_path: Path) -> None:
    """42 × 28 pixels, squares of 14: 3 · 2 = 6 tokens. 140 × 70 has too many (12 at most): scaled by √(9800/2352)."""
    own = expansion(models["qwen2_5_vl"])
    assert list(own.block(image(tmp_path, 42, 28))) == [own.placeholder] * 6
    # 140 / 2.041 = 68.6 → 4 squares, 70 / 2.041 = 34.3 → 2 squares
    assert list(own.block(image(tmp_path, 140, 70))) == [own.placeholder] * 8
    # 7 × 7 pixels have too few (2 at least): scaled by √(392/49) = 2.83 to 19.8, up to 2 · 2 squares
    assert list(own.block(image(tmp_path, 7, 7))) == [own.placeholder] * 4


def test_an_image_is_not_learned_and_its_place_is_known(models: dict[str, Path], tmp_path: Path) -> None:
    own = expansion(models["qwen2_5_vl"])
    pad = own.placeholder
    images = [image(tmp_path, 42, 28, 1), image(tmp_path, 28, 28, 2)]
    encoded = Encoded([5, pad, 6, 7, pad, 8], [False, True, True, False, False, True], straddling=1)
    found = own.expand(encoded, images)
    assert found.tokens == [5, *[pad] * 6, 6, 7, *[pad] * 4, 8]
    assert found.supervised == [False] * 7 + [True, False] + [False] * 4 + [True]
    assert [(each.start, each.end, each.image) for each in found.images] == [
        (1, 7, images[0]),
        (9, 13, images[1]),
    ]
    assert found.straddling == 1


@pytest.mark.parametrize("places, count", [(0, 1), (1, 0), (2, 1), (1, 2)])
def test_places_and_images_must_agree(
    models: dict[str, Path], tmp_path: Path, places: int, count: int
) -> None:
    own = expansion(models["llava"])
    encoded = Encoded([5, *[own.placeholder] * places], [False] * (1 + places))
    with pytest.raises(DataError, match=rf"{places} placeholder token\(s\) and {count} image\(s\)"):
        own.expand(encoded, [image(tmp_path, 28, 28)] * count)


def test_text_models_take_no_images(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert expansion_of(tmp_path) is None


@pytest.mark.parametrize(
    "family, name, changes, told",
    [
        ("llava", "preprocessor_config.json", {"do_center_crop": False}, "different sizes"),
        ("smolvlm", "processor_config.json", {"image_seq_len": 81}, "`image_seq_len` 81 .* 4 by"),
        (
            "qwen2_5_vl",
            "preprocessor_config.json",
            {"merge_size": 3},
            "`merge_size` 3 .* `spatial_merge_size` 2",
        ),
    ],
)
def test_files_that_contradict_each_other(
    tmp_path: Path, family: str, name: str, changes: dict[str, Any], told: str
) -> None:
    directory = write_model(tmp_path / family, family)
    patch(directory, name, **changes)
    with pytest.raises(DataError, match=told):
        expansion(directory).block(image(tmp_path, 28, 28))


def test_settings_may_stand_in_the_processors_file(tmp_path: Path) -> None:
    """That is where transformers 5 writes them; there they come first."""
    directory = write_model(tmp_path / "model", "qwen2_5_vl")
    settings = json.loads((directory / "preprocessor_config.json").read_text())
    patch(directory, "processor_config.json", image_processor={**settings, "max_pixels": 14 * 14 * 4})
    shown = image(tmp_path, 140, 70)
    assert len(expansion(directory).block(shown)) == 2
    from posttrain_plugins.training.pixels import processed

    assert processed(directory, shown.path)["image_grid_thw"].tolist() == [[1, 2, 4]]


def test_no_image_processor(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", "llava")
    (directory / "preprocessor_config.json").unlink()
    with pytest.raises(DataError, match="no image processor"):
        expansion(directory).block(image(tmp_path, 28, 28))


def test_too_narrow_for_qwen(models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="too narrow"):
        expansion(models["qwen2_5_vl"]).block(image(tmp_path, 201, 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_placeholder_is_the_templates(family: str, models: dict[str, Path]) -> None:
    encoder = Encoder.open(models[family])
    own = expansion(models[family])
    text = encoder.files.plain.id_to_token(own.placeholder)
    assert text in PLACEHOLDER.get(family, "<image>")
