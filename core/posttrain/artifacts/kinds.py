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


class PolicyFacts(_Facts):
    """Facts about a model or an adapter on its base."""

    type: Literal["policy"] = "policy"
    architecture: str | None = None
    dtype: str | None = None
    parameters: int | None = None
    layers: int | None = None
    width: int | None = None
    vocabulary: int | None = Field(default=None, description="size of the tokenizer, added tokens included")
    embeddings: int | None = Field(default=None, description="rows of the input embedding")
    context: int | None = Field(default=None, description="longest sequence in tokens")
    tokenizer: str | None = Field(
        default=None, description="hash of the tokenizer's vocabulary, merges and added tokens"
    )
    template: TemplateFingerprint | None = None
    has_template: bool | None = None
    bos: int | None = None
    eos: tuple[int, ...] | None = Field(default=None, description="every id that ends a generation")
    pad: int | None = None
    unk: int | None = None
    head: str | None = None
    base: str | None = Field(default=None, description="digest of the model an adapter belongs to")
    adapter: dict[str, Any] | None = None
    generation: dict[str, Any] | None = None


class ReportFacts(_Facts):
    """Facts about an evaluation report, a verdict or a promotion receipt."""

    type: Literal["report"] = "report"
    report: str | None = Field(default=None, description="evaluation, verdict or promotion")
    figures: dict[str, float] | None = None
    subjects: tuple[str, ...] | None = Field(default=None, description="digests of the models reported on")
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
