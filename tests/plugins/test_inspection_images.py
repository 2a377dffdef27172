from __future__ import annotations

from pathlib import Path

import pytest
from helpers.looking import shown
from helpers.vision import picture, write_model

from posttrain_plugins.data.formats import format_of
from posttrain_plugins.data.images.gallery import Gallery
from posttrain_plugins.inspection.gathering import Subject, inspect
from posttrain_plugins.inspection.models import open_model
from posttrain_plugins.inspection.trainers import preparation
from posttrain_plugins.inspection.views import Look
from posttrain_plugins.trainers.sft import Sft


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llava", "idefics3", "qwen2_5_vl"])
def test_the_tokens_of_an_image_are_given_and_whole(tmp_path: Path, family: str) -> None:
    model = open_model(str(write_model(tmp_path / "model", family)), tmp_path)
    name = Gallery(tmp_path / "data").take(picture(40, 30))
    row = {
        "messages": [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
            {"role": "assistant", "content": "It is noise."},
        ],
        "images": [name],
    }
    form, config = format_of("messages"), Sft.config.model_validate({})
    prepared = preparation(Sft(), config, form, model, tmp_path / "data")
    seen = inspect(Subject("rows", "messages", form, lambda: iter([row]), str), model, prepared, "it", [0])
    (view,) = seen.shown
    assert view.dropped is None
    (side,) = view.sides
    assert side.images == seen.statistics.images == 1
    assert view.turns[0].content == "[image]What is it?"
    assert shown(side, Look.LEARNED).endswith("It is noise.<|im_end|>")
    text = "".join(piece.text for piece in side.pieces)
    assert "What is it?" in text
    # The placeholder became several tokens, none of which is learned; the text has it once.
    many = [piece for piece in side.pieces if piece.id is not None and not piece.text and piece.special]
    assert many and not any(piece.supervised for piece in many)
