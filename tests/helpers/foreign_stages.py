"""Stages as somebody else writes them: they hand on a policy or tokens that are not quite what came in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from posttrain import Kind, Outcome, Port, Registration, Stage, StageConfig, hookimpl
from posttrain.artifacts.kinds import POLICY

POSTTRAIN_API = ">=1,<2"


class Change(StageConfig):
    """Options of `foreign/alter` and `foreign/mask`."""

    change: str


class Alter(Stage):
    """Hands on a policy with one thing changed; it cannot predict what it will put out."""

    config = Change
    inputs = (Port("model", POLICY),)
    target = f"{__name__}:alter"

    def outputs(self, config: Any) -> tuple[Port, ...]:
        return (Port("model", POLICY),)


class Mask(Stage):
    """Hands on tokenized rows with another mask."""

    config = Change
    inputs = (Port("data", frozenset({Kind.DATASET})), Port("model", POLICY))
    target = f"{__name__}:mask"

    def outputs(self, config: Any) -> tuple[Port, ...]:
        return (Port("data", frozenset({Kind.DATASET})),)


def alter(context: Any) -> Outcome:
    """Copy a policy's directory and change it."""
    from posttrain_plugins.models.artifact import facts_of

    source, directory = context.input("model"), context.output("model")
    for path in source.path.iterdir():
        if path.name not in ("content.json", "provenance.json"):
            shutil.copyfile(path, directory / path.name)
            (directory / path.name).chmod(0o644)
    CHANGES[context.config.change](directory)
    facts = facts_of(directory)
    context.describe("model", source.kind, facts)
    return Outcome(summary=context.config.change)


def mask(context: Any) -> Outcome:
    """Copy tokenized rows with other supervision."""
    from dataclasses import replace

    from posttrain_plugins.data.tokens.token_rows import Records, TokenRows, TokenWriter
    from posttrain_plugins.templates.encoder import Encoder

    source, encoder = context.input("data"), Encoder.open(context.input("model").path)
    rows = TokenRows(source.path)
    change = MASKS[context.config.change]
    with TokenWriter(context.output("data"), rows.roles) as writer:
        records = Records(rows.roles)
        for examples in rows.examples():
            records.add(
                [
                    replace(each, sequences=tuple(change(one, encoder) for one in each.sequences))
                    for each in examples
                ]
            )
        writer.add(records.batch(), list(rows.prompts()))
    context.describe("data", Kind.DATASET, source.facts)
    return Outcome()


def _json(path: Path, **changes: Any) -> None:
    config = json.loads(path.read_text()) if path.is_file() else {}
    config = {key: value for key, value in {**config, **changes}.items() if value is not ...}
    path.write_text(json.dumps(config))


def _weights(directory: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    from safetensors.torch import load_file, save_file

    path = next(directory.glob("*.safetensors"))
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def _template(directory: Path, change: Callable[[str], str]) -> None:
    path = directory / "chat_template.jinja"
    path.write_text(change(path.read_text()))


def _tokenizer(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def _permute(content: dict[str, Any]) -> None:
    """Give the plain characters each other's ids, as a tokenizer that was rebuilt in another order does."""
    vocabulary = content["model"]["vocab"]
    added = {token["content"] for token in content["added_tokens"]}
    plain = sorted((token for token in vocabulary if token not in added), key=lambda token: vocabulary[token])
    ids = [vocabulary[token] for token in plain]
    content["model"]["vocab"].update(zip(reversed(plain), ids, strict=True))


def _add_tokens(content: dict[str, Any]) -> None:
    first = max(content["model"]["vocab"].values()) + 1
    for number in range(3):
        token = f"<|new{number}|>"
        content["added_tokens"].append(
            {"id": first + number, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": False}
        )  # fmt: skip


def _resize(weights: dict[str, Any]) -> dict[str, Any]:
    import torch

    name = "model.embed_tokens.weight"
    return {**weights, name: torch.cat([weights[name], torch.zeros(8, weights[name].shape[1])])}


def _cast(weights: dict[str, Any]) -> dict[str, Any]:
    import torch

    return {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}


def _resized(directory: Path) -> None:
    _weights(directory, _resize)
    config = json.loads((directory / "config.json").read_text())
    _json(directory / "config.json", vocab_size=config["vocab_size"] + 8)


CHATML_END = "<|im_end|>"
ZEPHYR = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
CHANGES: Mapping[str, Callable[[Path], None]] = {
    "another template": lambda path: _template(path, lambda text: ZEPHYR),
    "a template in the tokenizer's config": lambda path: _json(
        path / "tokenizer_config.json", chat_template=ZEPHYR
    ),
    "no template": lambda path: (path / "chat_template.jinja").unlink(),
    "another end of sequence": lambda path: (
        _json(path / "tokenizer_config.json", eos_token="<|endoftext|>"),
        _json(path / "generation_config.json", eos_token_id=4),
    )[0],
    "no generation config": lambda path: (path / "generation_config.json").unlink(),
    "three more tokens": lambda path: _tokenizer(path, _add_tokens),
    "eight more embeddings": _resized,
    "bfloat16": lambda path: (_weights(path, _cast), _json(path / "config.json", dtype="bfloat16"))[0],
    "a layer dropped": lambda path: _weights(
        path, lambda weights: {name: each for name, each in weights.items() if ".layers.1." not in name}
    ),
    "a wrapper's prefix": lambda path: _weights(
        path, lambda weights: {f"module.{name}": each for name, each in weights.items()}
    ),
    "not a number": lambda path: _weights(
        path, lambda weights: {**weights, "model.norm.weight": weights["model.norm.weight"] * float("nan")}
    ),
    "a layer of zeros": lambda path: _weights(
        path, lambda weights: {name: each * (".layers.1." not in name) for name, each in weights.items()}
    ),
    "another rope_theta": lambda path: _json(
        path / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 500.0}
    ),
    "a longer context in the config": lambda path: _json(path / "config.json", max_position_embeddings=4096),
    "permuted ids": lambda path: _tokenizer(path, _permute),
    "lower case": lambda path: _tokenizer(
        path, lambda content: content.update(normalizer={"type": "Lowercase"})
    ),
    "truncation switched on": lambda path: _tokenizer(
        path,
        lambda content: content.update(
            truncation={"direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 0}
        ),
    ),
    "another lora_alpha": lambda path: _json(path / "adapter_config.json", lora_alpha=128),
    "another head": lambda path: _json(
        path / "config.json", architectures=["LlamaForSequenceClassification"]
    ),
    "nothing": lambda path: None,
}


def _without_ends(sequence: Any, encoder: Any) -> Any:
    """Mask every token that is the padding token, as collators do that mask by id."""
    from dataclasses import replace

    pairs = zip(sequence.tokens, sequence.supervised, strict=True)
    return replace(sequence, supervised=[bool(on and id != encoder.pad_id) for id, on in pairs])


def _with_second_bos(sequence: Any, encoder: Any) -> Any:
    from dataclasses import replace

    return replace(
        sequence,
        tokens=[encoder.bos_id, *sequence.tokens],
        supervised=[False, *map(bool, sequence.supervised)],
    )


def _all_learned(sequence: Any, encoder: Any) -> Any:
    from dataclasses import replace

    return replace(sequence, supervised=[False, *[True] * (len(sequence.tokens) - 1)])


MASKS: Mapping[str, Callable[[Any, Any], Any]] = {
    "padding ids masked": _without_ends,
    "BOS added": _with_second_bos,
    "prompts learned": _all_learned,
}


def idle(context: Any) -> Outcome:
    """Hand on what came in after no step at all, and call it a success."""
    return _handed_on(context, 0)


def frozen(context: Any) -> Outcome:
    """Hand on what came in after steps that changed nothing."""
    return _handed_on(context, 3)


def _handed_on(context: Any, steps: int) -> Outcome:
    source, directory = context.input("model"), context.output("model")
    for path in source.path.iterdir():
        if path.name not in ("content.json", "provenance.json"):
            shutil.copyfile(path, directory / path.name)
    context.describe("model", source.kind, source.facts)
    return Outcome(steps=steps)


def _trainer(target: str) -> type[Stage]:
    from posttrain_plugins.trainers.sft import Sft

    doc = "A trainer that changes nothing."
    return type(target.title(), (Sft,), {"target": f"{__name__}:{target}", "__doc__": doc})


@hookimpl
def posttrain_stages() -> list[Registration]:
    return [
        Registration("foreign/alter", "Hand on a policy, changed", Alter),
        Registration("foreign/mask", "Hand on tokens, masked otherwise", Mask),
    ]


@hookimpl
def posttrain_trainers() -> list[Registration]:
    return [
        Registration("foreign/idle", "Hand on a policy after no step", _trainer("idle")),
        Registration("foreign/frozen", "Hand on a policy, untrained", _trainer("frozen")),
    ]
