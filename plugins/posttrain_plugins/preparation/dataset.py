"""The dataset of a port as examples: from rows, or from tokens that `data.tokenize` has made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.component import Choice
from posttrain.contracts.format import Format
from posttrain.contracts.loss import Need
from posttrain.contracts.registration import Group
from posttrain.contracts.stage import Level, StageContext
from posttrain.contracts.trainer import Trainer
from posttrain.errors import DataError
from posttrain_plugins.data.formats import BUILT_IN, format_of
from posttrain_plugins.data.rows import stream_rows
from posttrain_plugins.data.tokens.token_rows import FORMATS, TokenRows, require_tokenizer
from posttrain_plugins.preparation.accounts import Refusals
from posttrain_plugins.preparation.examples import Prepared, prepare, prepare_tokens
from posttrain_plugins.training.options import EVALUATION

if TYPE_CHECKING:
    from posttrain_plugins.models.policy import Policy


def prepared_data(
    context: StageContext, trainer: Trainer, policy: Policy, port: str, needs: frozenset[Need]
) -> Prepared:
    """Return the examples of a port's dataset, and tell what became of its rows.

    Args:
        context: The stage's.
        trainer: Says what of a row is learned.
        policy: Its tokenizer and chat template.
        port: The dataset's port.
        needs: What the loss and the trainer's options need of a batch.

    Raises:
        DataError: No row can be trained on, or the tokens are those of another tokenizer.
    """
    data, config = context.input(port), context.config
    limit = config.max_length or policy.artifact.facts.context
    if data.facts.format in FORMATS:
        prepared = prepare_tokens(
            _tokens(data, policy), max_length=limit, truncation=config.truncation, bos=policy.encoder.bos_id
        )
    else:
        format = named_format(context, data.facts.format)
        prepared = prepare(
            trainer,
            trainer.rows(stream_rows(data), format, needs, config.seed),
            policy.encoder,
            format,
            max_length=limit,
            truncation=config.truncation,
            weight_column=config.weight_column,
            supervise=trainer.supervise_held_out(config) if port == EVALUATION else trainer.supervise(config),
            directory=data.path,
            needs=needs,
        )
    _require_embedded(prepared, policy.model.get_input_embeddings().weight.shape[0])
    remarks = [(Level.WARNING, text) for text in trainer.remarks(prepared.examples)]
    for level, text in (*prepared.notes, *remarks):
        context.note(text if port == "data" else f"port {port}: {text}", level)
    return prepared


def _require_embedded(prepared: Prepared, size: int) -> None:
    refused = Refusals()
    for example in prepared.examples:
        highest = max(max(sequence.tokens) for sequence in example.sequences)
        if highest >= size:
            error = DataError(
                "the row holds a token that the model has no embedding for",
                found=f"the id {highest}",
                expected=f"ids below {size}",
                fix="remove that token's text from the row, or resize the model's embeddings",
            )
            refused.add(example.row, error)
    refused.check(len(prepared.examples))


def named_format(context: StageContext, name: str) -> Format:
    """Return the format of a dataset: a built-in one, or that of a plugin."""
    if name in BUILT_IN:
        return format_of(name)
    found: Format = context.component(Choice(name=name), Group.FORMAT).plugin
    return found


def _tokens(data: Artifact, policy: Policy) -> TokenRows:
    fix = "tokenize it again, with this model connected to `data.tokenize`"
    require_tokenizer(data, policy.encoder.files.hash, fix)
    return TokenRows(data.path)
