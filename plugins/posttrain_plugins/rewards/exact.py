"""The reward `exact`: 1 when the completion is the reference answer."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from posttrain.contracts.component import Config
from posttrain.contracts.reward import Sample


class ExactConfig(Config):
    """Options of `exact`."""

    column: str = Field(default="answer", description="the dataset column that holds the reference answer")
    strip: bool = Field(default=True, description="ignore white space at both ends")


class Exact:
    """Scores 1.0 for the reference answer and 0.0 for other text; abstains on rows without a reference."""

    config = ExactConfig

    def __call__(self, samples: Sequence[Sample], config: ExactConfig) -> list[float | None]:
        """Return one score for each sample."""
        return [_score(sample, config) for sample in samples]


def _score(sample: Sample, config: ExactConfig) -> float | None:
    answer = sample.row.get(config.column)
    if answer is None:
        return None
    texts = (sample.completion, str(answer))
    given, wanted = (text.strip() for text in texts) if config.strip else texts
    return float(given == wanted)
