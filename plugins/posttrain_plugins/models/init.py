"""The stage `model.init`: a small new model, with a tokenizer made from the data it will see."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from posttrain.artifacts.kinds import Kind, PolicyFacts
from posttrain.contracts.stage import Inputs, Outcome, Port, Prediction, Stage, StageConfig, StageContext
from posttrain_plugins.data.rows import read_rows
from posttrain_plugins.models.vocabulary import (
    PAD,
    SPECIAL,
    UNKNOWN,
    bpe_tokenizer,
    character_tokenizer,
    text_of,
    write_tokenizer,
)
from posttrain_plugins.templates.library import END_OF_TURN, chatml

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_DATA = "data"
_MODEL = "model"
_SMALLEST_BPE = 256 + len(SPECIAL)


class InitConfig(StageConfig):
    """The model's shape; the names are those of transformers' `LlamaConfig`."""

    architecture: Literal["llama"] = Field(default="llama", description="the family of models")
    hidden_size: PositiveInt = Field(default=64, description="width")
    num_hidden_layers: PositiveInt = Field(default=2, description="layers")
    num_attention_heads: PositiveInt = Field(
        default=4, description="attention heads; they divide the width into parts of even size"
    )
    num_key_value_heads: PositiveInt | None = Field(
        default=None, description="heads of keys and values; as many as attention heads when left out"
    )
    intermediate_size: PositiveInt | None = Field(
        default=None, description="width of the feed-forward layers; four times the width when left out"
    )
    max_position_embeddings: PositiveInt = Field(default=256, description="longest sequence, in tokens")
    tie_word_embeddings: bool = Field(
        default=True, description="use one matrix for input and output embeddings"
    )
    tokenizer: Literal["character", "bpe"] = Field(
        default="character",
        description="`character`, one token a character of the data, or `bpe`, byte-level and trained on it",
    )
    vocab_size: PositiveInt | None = Field(default=None, description="size of a `bpe` vocabulary")
    template: Literal["chatml"] = Field(default="chatml", description="the chat template")
    seed: int = Field(default=0, description="seed of the weights")
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="precision of the weights")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        heads, groups = self.num_attention_heads, self.num_key_value_heads or self.num_attention_heads
        if self.hidden_size % (2 * heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} must be a multiple of {2 * heads}: "
                f"{heads} attention heads of even size"
            )
        if heads % groups:
            raise ValueError(
                f"num_attention_heads {heads} must be a multiple of num_key_value_heads {groups}"
            )
        if (self.tokenizer == "bpe") != (self.vocab_size is not None):
            raise ValueError("`vocab_size` belongs to `tokenizer: bpe`, which needs it")
        if self.vocab_size is not None and self.vocab_size < _SMALLEST_BPE:
            raise ValueError(f"vocab_size must be at least {_SMALLEST_BPE}: the bytes and the special tokens")
        return self


class Init(Stage):
    """Make a model from nothing. The characters or merges come from all text in the data's rows."""

    config = InitConfig
    inputs = (Port(_DATA, frozenset({Kind.DATASET}), many=True),)
    target = "posttrain_plugins.models.init:run"
    preload = ("torch", "transformers")
    tiny: ClassVar[Mapping[str, Any]] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": None,
        "intermediate_size": None,
    }

    def outputs(self, config: InitConfig) -> tuple[Port, ...]:
        """The model."""
        return (Port(_MODEL, frozenset({Kind.MODEL})),)

    def predict(self, config: InitConfig, inputs: Inputs) -> Mapping[str, Prediction]:
        """Shape and special tokens are known; vocabulary and template fingerprint depend on the data."""
        ids = {token: index for index, token in enumerate(SPECIAL)}
        facts = PolicyFacts(
            architecture=config.architecture,
            dtype=config.dtype,
            layers=config.num_hidden_layers,
            width=config.hidden_size,
            context=config.max_position_embeddings,
            has_template=True,
            eos=(ids[END_OF_TURN],),
            pad=ids[PAD],
            unk=ids[UNKNOWN],
            head="LlamaForCausalLM",
        )
        return {_MODEL: Prediction(Kind.MODEL, facts)}


def run(context: StageContext) -> Outcome:
    """Make tokenizer and weights and write the model."""
    from posttrain_plugins.models.policy import save_policy

    config: InitConfig = context.config
    tokenizer = _tokenizer(config, _texts(context))
    source = context.work / "tokenizer"
    source.mkdir(parents=True, exist_ok=True)
    write_tokenizer(source, tokenizer, chatml())
    facts = save_policy(context.output(_MODEL), _model(config, tokenizer), source)
    context.describe(_MODEL, Kind.MODEL, facts)
    summary = f"{facts.parameters:,} parameters, {facts.vocabulary} tokens"
    return Outcome(figures={"parameters": float(facts.parameters or 0)}, summary=summary)


def _texts(context: StageContext) -> Iterator[str]:
    for artifact in context.inputs[_DATA]:
        for row in read_rows(artifact):
            yield from text_of(row)


def _tokenizer(config: InitConfig, texts: Iterator[str]) -> Tokenizer:
    if config.vocab_size is None:
        return character_tokenizer(texts)
    return bpe_tokenizer(texts, config.vocab_size)


def _model(config: InitConfig, tokenizer: Tokenizer) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size or 4 * config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads or config.num_attention_heads,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(END_OF_TURN),
        pad_token_id=tokenizer.token_to_id(PAD),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return LlamaForCausalLM(shape).to(getattr(torch, config.dtype))
