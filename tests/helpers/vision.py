"""Tiny vision-language models with random weights, a tokenizer trained on a few words, and pictures."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from posttrain_plugins.models.artifact import write_config

WORDS = (
    "What is in this picture? Look at both of them and compare. A red square on a blue ground, "
    "two cats and a dog; nothing else. user assistant system\n" * 3
)
TILES = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
SPECIAL = [
    "<|pad|>",
    "<|im_start|>",
    "<|im_end|>",
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    *TILES,
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
FAMILIES = ("llava", "idefics3", "smolvlm", "qwen2_vl", "qwen2_5_vl")
PLACEHOLDER = dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), "<|vision_start|><|image_pad|><|vision_end|>")

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TEXT: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "rms_norm_eps": 1e-5,
}
TOWER: Mapping[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}


def tokenizer() -> Tokenizer:
    """Train a byte-level BPE tokenizer."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [WORDS],
        trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False),
    )
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return made


def write_model(directory: Path, family: str, seed: int = 0) -> Path:
    """Write a model directory of a family, with its processor's files."""
    directory.mkdir(parents=True, exist_ok=True)
    tokens = tokenizer()
    tokens.save(str(directory / "tokenizer.json"))
    names = {"eos_token": "<|im_end|>", "pad_token": "<|pad|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    template = TEMPLATE.replace("IMAGE", PLACEHOLDER.get(family, "<image>"))
    (directory / "chat_template.jinja").write_text(template)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, settings, processor = _MAKERS[family](tokens)
        # Larger than by default, so that what is seen changes the answer by far more than rounding does.
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(directory)
    write_config(directory / "config.json", json.loads((directory / "config.json").read_text()))
    (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    (directory / "processor_config.json").write_text(json.dumps(processor))
    return directory


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return a picture of noise."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def _text(tokens: Tokenizer) -> dict[str, Any]:
    return {
        **TEXT,
        "vocab_size": tokens.get_vocab_size(),
        "eos_token_id": tokens.token_to_id("<|im_end|>"),
        "pad_token_id": tokens.token_to_id("<|pad|>"),
    }


def _llava(tokens: Tokenizer) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**TOWER, projection_dim=16),
        text_config=LlamaConfig(**_text(tokens)),
        image_token_index=tokens.token_to_id("<image>"),
        vision_feature_select_strategy="default",
        vision_feature_layer=-2,
    )
    settings = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 28},
        "crop_size": {"height": 28, "width": 28},
        "do_center_crop": True,
    }
    processor = {
        "processor_class": "LlavaProcessor",
        "patch_size": 7,
        "num_additional_image_tokens": 1,
        "vision_feature_select_strategy": "default",
        "image_token": "<image>",
    }
    return LlavaForConditionalGeneration(config), settings, processor


def _idefics3(tokens: Tokenizer, name: str = "Idefics3") -> tuple[Any, dict[str, Any], dict[str, Any]]:
    import transformers

    config = getattr(transformers, f"{name}Config")(
        vision_config=dict(TOWER),
        text_config={**_text(tokens), "model_type": "llama"},
        image_token_id=tokens.token_to_id("<image>"),
        pad_token_id=tokens.token_to_id("<|pad|>"),
        scale_factor=2,
    )
    settings = {
        "image_processor_type": f"{name}ImageProcessor",
        "size": {"longest_edge": 56},
        "max_image_size": {"longest_edge": 28},
        "do_image_splitting": True,
    }
    processor = {"processor_class": f"{name}Processor", "image_seq_len": 4}
    return getattr(transformers, f"{name}ForConditionalGeneration")(config), settings, processor


def _smolvlm(tokens: Tokenizer) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    return _idefics3(tokens, "SmolVLM")


def _qwen(
    name: str, vision: Mapping[str, Any], tokens: Tokenizer
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    import transformers

    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    patches = {"patch_size": 7, "spatial_merge_size": 2, "temporal_patch_size": 2}
    config = getattr(transformers, f"{name}Config")(
        text_config={**_text(tokens), "rope_parameters": rope},
        vision_config={"depth": 2, "num_heads": 2, **patches, **vision},
        image_token_id=tokens.token_to_id("<|image_pad|>"),
        video_token_id=tokens.token_to_id("<|video_pad|>"),
        vision_start_token_id=tokens.token_to_id("<|vision_start|>"),
        vision_end_token_id=tokens.token_to_id("<|vision_end|>"),
    )
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": 14 * 14 * 2,
        "max_pixels": 14 * 14 * 12,
        "patch_size": 7,
        "merge_size": 2,
        "temporal_patch_size": 2,
    }
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    return model, settings, {"processor_class": f"{name}Processor"}


_QWEN2 = {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
_QWEN2_5 = {
    "hidden_size": 16,
    "out_hidden_size": 32,
    "intermediate_size": 24,
    "window_size": 28,
    "fullatt_block_indexes": [1],
}
_MAKERS: Mapping[str, Callable[[Tokenizer], tuple[Any, dict[str, Any], dict[str, Any]]]] = {
    "llava": _llava,
    "idefics3": _idefics3,
    "smolvlm": _smolvlm,
    "qwen2_vl": partial(_qwen, "Qwen2VL", _QWEN2),
    "qwen2_5_vl": partial(_qwen, "Qwen2_5_VL", _QWEN2_5),
}
