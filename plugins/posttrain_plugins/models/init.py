"""The stage `model.init`: a small new model, with a tokenizer made from the data it will see."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from posttrain.artifacts.kinds import Kind, PolicyFacts
from posttrain.contracts.stage import (
    Certainty,
    Finding,
    Inputs,
    Level,
    Outcome,
    Port,
    Prediction,
    SourceMark,
    Stage,
    StageConfig,
    StageContext,
)
from posttrain_plugins.data.rows import read_rows
from posttrain_plugins.models.template import (
    TemplateOption,
    put_template,
    template_field,
    template_source,
    text_of_template,
    with_file,
)
from posttrain_plugins.models.vocabulary import (
    PAD,
    SPECIAL,
    UNKNOWN,
    bpe_tokenizer,
    character_tokenizer,
    text_of,
    write_tokenizer,
)
from posttrain_plugins.templates.calling import WITH_CALLS
from posttrain_plugins.templates.library import END_OF_TURN, named_template

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_DATA = "data"
_MODEL = "model"


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
    template: TemplateOption = template_field("chatml", "the chat template")
    template_file: Annotated[str | None, SourceMark()] = Field(
        default=None, description="the same, from a jinja file of any name"
    )
    special_tokens: list[str] = Field(
        default=[], description="further special tokens, such as those that a template of your own writes"
    )
    seed: int = Field(default=0, description="seed of the weights")
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="precision of the weights")

    @model_validator(mode="before")
    @classmethod
    def _file(cls, values: Any) -> Any:
        """Know a template that is a path."""
        return with_file(values)

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
        smallest = 256 + len(self.special)
        if self.vocab_size is not None and self.vocab_size < smallest:
            raise ValueError(f"vocab_size must be at least {smallest}: the bytes and the special tokens")
        if self.template_file is not None and "template" in self.model_fields_set:
            raise ValueError("give `template` or `template_file`, not both")
        return self

    @property
    def special(self) -> tuple[str, ...]:
        """The special tokens of the tokenizer; their ids are their places."""
        own = () if self.template_file is not None else named_template(self.template).tokens
        return tuple(dict.fromkeys((*SPECIAL, *own, *self.special_tokens)))

    @property
    def ends(self) -> tuple[str, ...]:
        """The tokens that end an assistant's turn; the first is the end-of-sequence token."""
        own = () if self.template_file is not None else named_template(self.template).ends
        return own or (END_OF_TURN,)


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

    def check(self, config: InitConfig, inputs: Inputs) -> Iterable[Finding]:
        """Report a template file that is missing."""
        if config.template_file is not None and not Path(config.template_file).is_file():
            yield Finding(
                _MODEL,
                Level.ERROR,
                Certainty.VERIFIED,
                f"there is no {config.template_file}",
                fix="check `template`; it is relative to the spec file's folder",
            )

    def predict(self, config: InitConfig, inputs: Inputs) -> Mapping[str, Prediction]:
        """Shape and special tokens are known; vocabulary and template fingerprint depend on the data."""
        ids = {token: index for index, token in enumerate(config.special)}
        ends = [ids[end] for end in config.ends]
        named = config.template_file is None
        facts = PolicyFacts(
            architecture=config.architecture,
            dtype=config.dtype,
            layers=config.num_hidden_layers,
            width=config.hidden_size,
            context=config.max_position_embeddings,
            has_template=True,
            overruled=(),
            opens=True if named else None,
            calls=config.template in WITH_CALLS if named else None,
            eos=tuple(sorted(ends)) if named else None,
            end_of_turn=ends[0] if named else None,
            declared_eos=tuple(sorted(ends)) if named else None,
            pad=ids[PAD],
            unk=ids[UNKNOWN],
            head="LlamaForCausalLM",
        )
        return {_MODEL: Prediction(Kind.MODEL, facts)}


def run(context: StageContext) -> Outcome:
    """Make tokenizer and weights and write the model."""
    from posttrain_plugins.models.policy import save_policy

    config: InitConfig = context.config
    file = None if config.template_file is None else context.base / config.template_file
    template = template_source(config.template, file)
    tokenizer = _tokenizer(config, template, _texts(context))
    source = context.work / "tokenizer"
    source.mkdir(parents=True, exist_ok=True)
    write_tokenizer(source, tokenizer, template, config.ends)
    if file is not None:
        put_template(source, None, file)
    facts = save_policy(context.output(_MODEL), _model(config, tokenizer), source)
    context.describe(_MODEL, Kind.MODEL, facts)
    summary = f"{facts.parameters:,} parameters, {facts.vocabulary} tokens"
    return Outcome(figures={"parameters": float(facts.parameters or 0)}, summary=summary)


def _texts(context: StageContext) -> Iterator[str]:
    for artifact in context.inputs[_DATA]:
        for row in read_rows(artifact):
            yield from text_of(row)


def _tokenizer(config: InitConfig, template: str, texts: Iterator[str]) -> Tokenizer:
    if config.vocab_size is None:
        always = text_of_template(template, config.special, config.ends[0])
        return character_tokenizer(texts, config.special, always)
    return bpe_tokenizer(texts, config.vocab_size, config.special)


def _model(config: InitConfig, tokenizer: Tokenizer) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    ends: list[Any] = [tokenizer.token_to_id(end) for end in config.ends]
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
        eos_token_id=ends if len(ends) > 1 else ends[0],
        pad_token_id=tokenizer.token_to_id(PAD),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return LlamaForCausalLM(shape).to(getattr(torch, config.dtype))
