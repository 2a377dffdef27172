"""The tokens of an image, by family.

Each function mirrors what the family's image processor does to the size of an image, and what its model makes of
the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from posttrain.errors import DataError
from posttrain_plugins.templates.vision.files import Vision

Block = Callable[[int, int], Sequence[int]]
"""(height, width) → the tokens that stand for an image of that size."""

CLASS_TOKENS = {"clip_vision_model": 1, "siglip_vision_model": 0}
"""Outputs of a vision tower beside those of the patches."""
LARGEST = 4096
"""Pixels of the longer side to which Idefics3's processor scales down in any case."""
NARROWEST = 200
"""Ratio of the sides that Qwen's processor does not take."""


def llava(vision: Vision) -> Block:
    """LLaVA: a token for each patch of the image at its one size (Liu et al. 2023, https://arxiv.org/abs/2310.03744).

    The class token of a CLIP tower is among them where the model keeps it (`vision_feature_select_strategy: full`).
    """
    config = vision.config
    tower: Mapping[str, Any] = config.get("vision_config") or {}
    kind = str(tower.get("model_type", "clip_vision_model"))
    if kind not in CLASS_TOKENS:
        raise DataError(
            "images cannot be used with this vision tower",
            where=str(vision.directory),
            found=kind,
            expected=" or ".join(CLASS_TOKENS),
        )
    patch = vision.number(tower, "patch_size", 14)
    height, width = _output_size(vision)
    first = config.get("vision_feature_select_strategy", "default") == "default"
    count = (height // patch) * (width // patch) + CLASS_TOKENS[kind] - int(first)
    block = [_placeholder(config)] * count
    return lambda height, width: block


def idefics3(vision: Vision) -> Block:
    """Idefics3 and SmolVLM: tiles row by row, then the whole image (Laurençon et al. 2024, https://arxiv.org/abs/2408.12637).

    Each tile is written as `<fake_token_around_image><row_1_col_1>` and the tokens of its patches after the pixel
    shuffle; rows end in a newline.
    """
    config, settings = vision.config, vision.settings
    tile = vision.number(settings.get("max_image_size") or {"longest_edge": 364}, "longest_edge")
    patch = vision.number(config.get("vision_config") or {}, "patch_size", 32)
    count = (tile // patch) ** 2 // vision.number(config, "scale_factor", 2) ** 2
    stated = vision.processor.get("image_seq_len", count)
    if stated != count:
        raise DataError(
            "the model's files disagree about the tokens of an image",
            where=str(vision.directory),
            found=f"`image_seq_len` {stated} in `processor_config.json`, {count} by `config.json`",
            fix="take both files from the same model",
        )
    files = vision.tokenizer
    image = str(files.plain.id_to_token(_placeholder(config))) * count
    fake = _special(files.config, "fake_image_token", "<fake_token_around_image>")
    whole = fake + _special(files.config, "global_image_token", "<global-img>") + image + fake

    @cache
    def tokens(rows: int, columns: int) -> Sequence[int]:
        lines = (
            "".join(f"{fake}<row_{row + 1}_col_{column + 1}>{image}" for column in range(columns)) + "\n"
            for row in range(rows)
        )
        text = "".join(lines) + "\n" + whole if rows else whole
        return tuple(files.plain.encode(text, add_special_tokens=False).ids)

    return lambda height, width: tokens(*_tiles(settings, tile, height, width))


def qwen2_5(vision: Vision) -> Block:
    """Qwen2-VL and Qwen2.5-VL: a token for each merged square of patches (https://arxiv.org/abs/2409.12191)."""
    config, settings = vision.config, vision.settings
    patch = vision.number(settings, "patch_size", 14)
    merge = vision.number(settings, "merge_size", 2)
    expected = vision.number(config.get("vision_config") or {}, "spatial_merge_size", 2)
    if merge != expected:
        raise DataError(
            "the model's files disagree about how many patches a token stands for",
            where=str(vision.directory),
            found=f"`merge_size` {merge} of the image processor, `spatial_merge_size` {expected} of the model",
            fix="take both files from the same model",
        )
    size: Mapping[str, Any] = settings.get("size") or {}
    least = settings.get("min_pixels") or size.get("shortest_edge") or 56 * 56
    most = settings.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280
    token = _placeholder(config)

    def block(height: int, width: int) -> Sequence[int]:
        if max(height, width) > NARROWEST * min(height, width):
            raise DataError(
                "the image is too narrow for the model",
                found=f"{height} × {width} pixels",
                expected=f"sides that differ at most {NARROWEST} times",
            )
        if settings.get("do_resize", True):
            height, width = _smart_size(height, width, patch * merge, least, most)
        return [token] * ((height // patch) * (width // patch) // merge**2)

    return block


FAMILIES: Mapping[str, Callable[[Vision], Block]] = {
    "llava": llava,
    "idefics3": idefics3,
    "smolvlm": idefics3,
    "qwen2_vl": qwen2_5,
    "qwen2_5_vl": qwen2_5,
}
"""By `model_type`."""


def _placeholder(config: Mapping[str, Any]) -> int:
    return int(config.get("image_token_id", config.get("image_token_index", -1)))


def _special(config: Mapping[str, Any], name: str, default: str) -> str:
    """Return a special token that a tokenizer's configuration may call by a name of its own."""
    extra = config.get("extra_special_tokens")
    value = (extra.get(name) if isinstance(extra, Mapping) else None) or config.get(name) or default
    return str(value["content"]) if isinstance(value, Mapping) else str(value)


def _output_size(vision: Vision) -> tuple[int, int]:
    """Return height and width that an image processor like CLIP's gives to every image."""
    settings = vision.settings
    crops = settings.get("do_center_crop", not str(settings.get("image_processor_type")).startswith("Siglip"))
    size = settings.get("crop_size", 224) if crops else settings.get("size", 224)
    if isinstance(size, int):
        return size, size
    height, width = (size or {}).get("height"), (size or {}).get("width")
    if (
        not isinstance(height, int)
        or not isinstance(width, int)
        or not (crops or settings.get("do_resize", True))
    ):
        raise DataError(
            "the image processor leaves images at different sizes, which this model does not take",
            where=str(vision.directory),
            found=repr(size),
            expected="`crop_size`, or a `size` of height and width",
        )
    return height, width


def _tiles(settings: Mapping[str, Any], tile: int, height: int, width: int) -> tuple[int, int]:
    """Return rows and columns of the tiles of an image; 0 and 0 where it stays whole."""
    if not settings.get("do_image_splitting", True):
        return 0, 0
    if settings.get("do_resize", True):
        height, width = _scaled(settings.get("size") or {"longest_edge": 4 * 364}, height, width)
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = math.ceil(int(width / ratio) / tile) * tile
    else:
        height = math.ceil(height / tile) * tile
        width = math.ceil(int(height * ratio) / tile) * tile
    return (height // tile, width // tile) if max(height, width) > tile else (0, 0)


def _scaled(size: Mapping[str, Any], height: int, width: int) -> tuple[int, int]:
    """Return the size of an image whose longer side is brought to a length; the shorter one becomes even."""
    if not size.get("longest_edge"):
        return int(size["height"]), int(size["width"])
    ratio = width / height
    if width >= height:
        width = size["longest_edge"]
        height = int(width / ratio)
        height += height % 2
    else:
        height = size["longest_edge"]
        width = int(height * ratio)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    ratio = width / height
    if width >= height and width > LARGEST:
        height, width = int(LARGEST / ratio), LARGEST
    elif height > width and height > LARGEST:
        height, width = LARGEST, int(LARGEST * ratio)
    return max(height, 1), max(width, 1)


def _smart_size(height: int, width: int, factor: int, least: int, most: int) -> tuple[int, int]:
    """Return the nearest multiples of `factor` whose product lies between two numbers of pixels."""
    high, wide = round(height / factor) * factor, round(width / factor) * factor
    if high * wide > most:
        scale = math.sqrt(height * width / most)
        high = max(factor, math.floor(height / scale / factor) * factor)
        wide = max(factor, math.floor(width / scale / factor) * factor)
    elif high * wide < least:
        scale = math.sqrt(least / (height * width))
        high, wide = math.ceil(height * scale / factor) * factor, math.ceil(width * scale / factor) * factor
    return high, wide
