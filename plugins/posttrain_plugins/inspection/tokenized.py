"""Looking at a tokenized dataset: its rows are tokens already, and packed ones hold several examples."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.trainer import Example
from posttrain.errors import DataError
from posttrain_plugins.data.rows import PROMPTS
from posttrain_plugins.data.tokens.token_rows import TokenRows, require_tokenizer
from posttrain_plugins.inspection.gathering import Watch, training_of
from posttrain_plugins.inspection.models import Model, model_view
from posttrain_plugins.inspection.pieces import pieces_of
from posttrain_plugins.inspection.statistics import Census, Statistics
from posttrain_plugins.inspection.views import Inspection, ModelView, Remark, RowView, Side
from posttrain_plugins.preparation.examples import Prepared, prepare_tokens


@dataclass(frozen=True)
class Fit:
    """How a trainer fits tokenized rows to a length.

    Args:
        trainer: The trainer's name.
        max_length: Its longest sequence, in tokens; None for no limit.
        truncation: What becomes of longer ones.
    """

    trainer: str
    max_length: int | None
    truncation: str

    def __call__(self, source: Any, model: Model) -> Prepared:
        """Prepare rows as training does."""
        return prepare_tokens(
            source, max_length=self.max_length, truncation=self.truncation, bos=model.encoder.bos_id
        )


@dataclass(frozen=True)
class _One:
    """A source of one example."""

    example: Example

    def examples(self) -> Iterator[list[Example]]:
        yield [self.example]


def inspect_tokens(
    artifact: Artifact, name: str, model: Model, fit: Fit, wanted: Collection[int]
) -> Inspection:
    """Look at a tokenized dataset and at some of its rows; as `gathering.inspect` otherwise.

    Raises:
        DataError: The tokens are another tokenizer's, or no row can be trained on.
    """
    fix = "name the model that was connected to `data.tokenize`"
    require_tokenizer(artifact, model.encoder.files.hash, fix)
    source = TokenRows(artifact.path)
    watch = Watch(wanted, Census(str(artifact.facts.format)))
    prepared = fit(source, model)
    watch.account.take(prepared)
    for example in prepared.examples:
        watch.keep(example)
    seen: set[bytes] = set()
    rows = 0
    for rows, held in enumerate(source.examples(), 1):
        seen.add(hashlib.sha256(b"|".join(map(_content, held))).digest())
        if rows - 1 in wanted:
            watch.views[rows - 1] = _row(held, rows, model, fit)
    return Inspection(
        source=name,
        format=watch.census.format,
        rows=rows,
        complete=True,
        statistics=_statistics(artifact, rows, rows - len(seen), watch),
        model=_view(artifact, model),
        training=training_of(
            fit.trainer,
            fit.max_length,
            fit.truncation,
            watch,
            intended=True,
            examples=None if watch.account.rows == rows else watch.account.rows,
        ),
        shown=tuple(watch.views[index] for index in sorted(watch.views)),
    )


def _view(artifact: Artifact, model: Model) -> ModelView:
    """Look at a model, and say where the rows were tokenized with another chat template, as the rule H064 does."""
    view, made = model_view(model), artifact.facts.tokens
    if made is None or None in (made.template, view.template) or made.template == view.template:
        return view
    stale = Remark(
        "tokens-stale",
        f"the rows were tokenized with another chat template ({str(made.template)[:12]}) than the model's "
        f"({str(view.template)[:12]}) [H064]",
        None,
        "tokenize the rows again with this model",
    )
    return replace(view, remarks=(stale, *view.remarks))


def _content(example: Example) -> bytes:
    return b";".join(bytes(memoryview(sequence.tokens)) for sequence in example.sequences)  # type: ignore[arg-type]


def _row(held: Sequence[Example], number: int, model: Model, fit: Fit) -> RowView:
    sides: list[Side] = []
    reasons = []
    for example in held:
        try:
            kept = fit(_One(example), model).examples[0]
        except DataError as error:
            kept = example
            reasons.append(f"example {example.row + 1}: {error.found or error.message}")
        of = f" of example {example.row + 1}" if len(held) > 1 else ""
        sides.extend(_sides(example, kept, model, of))
    return RowView(number, f"row {number}", (), sides=tuple(sides), dropped="; ".join(reasons) or None)


def _sides(example: Example, kept: Example, model: Model, of: str) -> Iterator[Side]:
    encoder = model.encoder
    for whole, after in zip(example.sequences, kept.sequences, strict=True):
        text = encoder.decode([int(token) for token in whole.tokens], skip_special=False)
        yield Side(f"{whole.role}{of}", pieces_of(encoder, text, (), whole, after))


def _statistics(artifact: Artifact, rows: int, equal: int, watch: Watch) -> Statistics:
    with artifact.file(PROMPTS).open(encoding="ascii") as lines:
        prompts = set(lines)
    return Statistics(
        rows=rows,
        format=watch.census.format,
        columns={},
        characters=None,
        turns=None,
        roles={},
        conversations=0,
        tools=0,
        images=0,
        equal=equal,
        asked=rows - len(prompts),
        longest=(),
        tokens=watch.sizes.tokens(),
    )
