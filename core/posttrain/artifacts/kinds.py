"""The closed set of artifact kinds and the facts that stages rely on.

A fact that is `None` is not known: in a prediction it may become known later, in a committed artifact it does not apply
or could not be determined. Rules treat `None` as "unknown", never as "equal".
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Kind(StrEnum):
    """What an artifact is."""

    DATASET = "dataset"
    MODEL = "model"
    ADAPTER = "adapter"
    REWARD_MODEL = "reward-model"
    PROCESS_REWARD_MODEL = "process-reward-model"
    LOG_PROBS = "log-probs"
    ROLLOUTS = "rollouts"
    REPORT = "report"


POLICY = frozenset({Kind.MODEL, Kind.ADAPTER})
"""The kinds that can act as a policy."""


class _Facts(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TemplateFingerprint(_Facts):
    """What a chat template does to a fixed set of probe conversations.

    `tokens` covers the token ids (so the tokenizer too), `text` the rendered text alone, which compares across
    tokenizers. `refusals` counts the probes the template refuses; a refusal is part of both hashes.
    """

    tokens: str
    text: str
    refusals: int = 0
    dated: bool = False


class TokenFacts(_Facts):
    """What tokenized rows were made with: they are of use to a policy with the same tokenizer and template alone."""

    tokenizer: str | None = Field(default=None, description="hash of the tokenizer")
    template: str | None = Field(default=None, description="the chat template's fingerprint `tokens`")
    max_length: int | None = Field(default=None, description="longest row in tokens")
    packed: bool | None = Field(default=None, description="whether a row may hold several examples")


class LogProbFacts(_Facts):
    """What log-probs of a dataset's answers were made of: they are of use where all of it is the same."""

    policy: str | None = Field(default=None, description="digest of the policy that scored")
    data: str | None = Field(default=None, description="digest of the dataset")
    roles: tuple[str, ...] | None = Field(default=None, description="what the answers are to their rows")
    tokens: bool | None = Field(
        default=None, description="whether the log-prob of each token is kept, and not their sum alone"
    )
    seed: int | None = Field(
        default=None, description="seed by which rows were given the answers of other rows"
    )
    options: dict[str, Any] | None = Field(default=None, description="options that change the values")


class DatasetFacts(_Facts):
    """Facts about a dataset artifact."""

    type: Literal["dataset"] = "dataset"
    format: str | None = None
    columns: tuple[str, ...] | None = None
    rows: int | None = None
    policy: str | None = Field(
        default=None, description="digest of the policy that generated the completions"
    )
    conversational: bool | None = Field(
        default=None, description="whether any row holds messages, which need a chat template"
    )
    calls: bool | None = Field(default=None, description="whether any row holds calls of tools")
    longest: int | None = Field(default=None, description="characters of the longest row")
    flaws: dict[str, int] | None = Field(
        default=None, description="rows by what is odd about them, such as `identical_pairs`"
    )
    tokens: TokenFacts | None = Field(default=None, description="of tokenized rows, what made them")
    log_probs: LogProbFacts | None = Field(default=None, description="of log-probs, what made them")


class MergeFacts(_Facts):
    """What merging an adapter into its base did to the logits of a fixed probe."""

    gap: float | None = Field(
        default=None,
        description="largest difference of a logit to the adapter on its base, as it was trained",
    )
    effect: float | None = Field(
        default=None, description="largest difference of a logit that the adapter itself made to its base"
    )


class ScoreFacts(_Facts):
    """What a model that gives numbers came to on the data it was judged on."""

    mean: float | None = Field(default=None, description="mean of its numbers")
    deviation: float | None = Field(default=None, description="their standard deviation")
    count: int | None = Field(default=None, description="how many numbers that rests on")
    accuracy: float | None = Field(
        default=None, description="share of pairs whose better answer, or of steps whose label, it tells"
    )
    judged: int | None = Field(default=None, description="how many pairs or steps that rests on")
    held_out: bool | None = Field(default=None, description="whether none of that was trained on")
    separator: str | None = Field(
        default=None, description="what ends every step that is a string, where numbers are those of steps"
    )


class PolicyFacts(_Facts):
    """Facts about a model or an adapter on its base."""

    type: Literal["policy"] = "policy"
    architecture: str | None = None
    shape: dict[str, Any] | None = Field(
        default=None, description="the config's options that decide what the weights compute"
    )
    dtype: str | None = None
    parameters: int | None = None
    layers: int | None = None
    width: int | None = None
    vocabulary: int | None = Field(default=None, description="size of the tokenizer, added tokens included")
    reachable: int | None = Field(
        default=None, description="one more than the highest id that texts and the template give"
    )
    embeddings: int | None = Field(default=None, description="rows of the input embedding")
    context: int | None = Field(default=None, description="longest sequence in tokens")
    tokenizer: str | None = Field(
        default=None, description="hash of the tokenizer's vocabulary, merges and added tokens"
    )
    template: TemplateFingerprint | None = None
    has_template: bool | None = None
    template_name: str | None = Field(
        default=None,
        description="the template of the library that it will have, while what that renders is not known",
    )
    overruled: tuple[str, ...] | None = Field(
        default=None, description="files that hold another chat template than the one that counts"
    )
    opens: bool | None = Field(
        default=None, description="whether the generation prompt is what the template puts before an answer"
    )
    calls: bool | None = Field(default=None, description="whether the template shows calls of tools")
    bos_twice: bool | None = Field(
        default=None, description="whether the template prints BOS and the tokenizer would add another"
    )
    bos: int | None = None
    eos: tuple[int, ...] | None = Field(default=None, description="every id that ends a generation")
    end_of_turn: int | None = Field(
        default=None, description="the id that closes an answer in the chat template"
    )
    declared_eos: tuple[int, ...] | None = Field(
        default=None, description="the ids that generation config, config and tokenizer call the end"
    )
    pad: int | None = None
    unk: int | None = None
    head: str | None = None
    missing: tuple[str, ...] | None = Field(
        default=None, description="weights that the config asks for and the files lack"
    )
    base: str | None = Field(default=None, description="digest of the model an adapter belongs to")
    adapter: dict[str, Any] | None = None
    quantization: dict[str, Any] | None = Field(
        default=None, description="how the base was rounded while an adapter was trained on it"
    )
    merge: MergeFacts | None = Field(default=None, description="of a merged adapter, what merging changed")
    sees: bool | None = Field(default=None, description="whether the model takes images")
    generation: dict[str, Any] | None = None
    scores: ScoreFacts | None = Field(
        default=None, description="of a model that gives numbers, what these come to"
    )


class ReportFacts(_Facts):
    """Facts about an evaluation report, a verdict or a promotion receipt."""

    type: Literal["report"] = "report"
    report: str | None = Field(default=None, description="evaluation, verdict or promotion")
    figures: dict[str, float] | None = None
    subjects: tuple[str, ...] | None = Field(default=None, description="digests of the models reported on")
    data: str | None = Field(default=None, description="digest of the dataset that was evaluated on")
    unanswered: dict[str, float] | None = Field(
        default=None, description="share of answers that are empty or cut off, by digest of the model"
    )
    verdict: str | None = None


Facts = Annotated[DatasetFacts | PolicyFacts | ReportFacts, Field(discriminator="type")]

FACTS_OF: dict[Kind, type[DatasetFacts] | type[PolicyFacts] | type[ReportFacts]] = {
    Kind.DATASET: DatasetFacts,
    Kind.ROLLOUTS: DatasetFacts,
    Kind.LOG_PROBS: DatasetFacts,
    Kind.MODEL: PolicyFacts,
    Kind.ADAPTER: PolicyFacts,
    Kind.REWARD_MODEL: PolicyFacts,
    Kind.PROCESS_REWARD_MODEL: PolicyFacts,
    Kind.REPORT: ReportFacts,
}
