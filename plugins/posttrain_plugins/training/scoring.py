"""What `data.log_probs` does: the loop's own pass over a reference, without a training around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

from posttrain.artifacts.kinds import Kind
from posttrain.contracts.component import Component, NoOptions
from posttrain.contracts.loss import Loss, Need
from posttrain.contracts.stage import Level, Outcome, StageContext
from posttrain.contracts.trainer import Example, Trainer
from posttrain_plugins.backends.single import Single
from posttrain_plugins.data.log_probs import LogProbsConfig, log_prob_facts
from posttrain_plugins.models.policy import Policy, open_policy, usable_device
from posttrain_plugins.preparation.dataset import prepared_data
from posttrain_plugins.stopping import pauses
from posttrain_plugins.trainers.dpo import Dpo
from posttrain_plugins.trainers.kto import Kto
from posttrain_plugins.training.assembly import bounded
from posttrain_plugins.training.batches import Budget, probe
from posttrain_plugins.training.options import LOG_PROBS, TOKENS
from posttrain_plugins.training.reference import log_probs_identity, scored, write_log_probs
from posttrain_plugins.training.setting import deterministic
from posttrain_plugins.training.step import Stepper
from posttrain_plugins.training.way import PRECISIONS, STEPS, Trial

READERS: Mapping[str, Trainer] = {"preference": Dpo(), "token_pairs": Dpo(), "unpaired_preference": Kto()}
"""Whose answers of a row are scored, by the dataset's format."""
ROWS = 8
"""Rows that are taken for a step when a layout is chosen."""


def run(context: StageContext) -> Outcome:
    """Score the answers of port `data` with the policy of port `model`.

    Raises:
        DataError: No row can be scored.
        Interrupted: The stage was asked to stop.
    """
    config: LogProbsConfig = context.config
    data, source = context.input("data"), context.input("model")
    reader = READERS[data.facts.format]
    with deterministic(config.seed):
        policy = open_policy(source, context, device=usable_device(), quantization=config.quantization)
        needs = frozenset({Need.MISMATCHED} if config.mismatched else ())
        examples = prepared_data(context, reader, policy, "data", needs).examples
        pause, total = pauses(context, "rows", "scoring"), len(examples)
        stepper = _stepper(context, policy, reader, examples)
        found = scored(stepper, examples, config.tokens, lambda done: pause(done, total))
    write_log_probs(context.output(LOG_PROBS), found, log_probs_identity(config, source.digest, examples))
    facts = log_prob_facts(
        config, source.facts, data.facts.format, source.digest, data.digest, rows=len(examples)
    )
    context.describe(LOG_PROBS, Kind.LOG_PROBS, facts)
    tokens = sum(example.predicted for example in examples)
    surprise = -sum(float(each.double().sum()) for each in found.values()) / tokens
    return Outcome(
        figures={"rows": float(len(examples)), "tokens": float(tokens), "surprise": surprise},
        summary=f"{tokens} answer tokens in {len(examples)} rows, {surprise:.3f} nats each",
    )


def _stepper(context: StageContext, policy: Policy, reader: Trainer, examples: Sequence[Example]) -> Stepper:
    """Return what scores, with head and layout chosen as a training chooses them."""
    config, model, parallel = context.config, policy.model, Single()
    pad, waiting = policy.encoder.pad_id or 0, iter(examples)
    steps = [[each.learned for each in islice(waiting, ROWS)] for _ in range(STEPS)]
    way = Trial(probe(examples), steps, pad, parallel.device, config.precision).way(model, config.layout)
    for text in way.told:
        context.note(text, Level.WARNING)
    stepper = Stepper(
        model=model,
        trainer=reader,
        loss=Component("none", Loss(), NoOptions()),
        pad=pad,
        budget=Budget(1),
        head=way.head,
        layout=way.layout,
        parallel=parallel,
        precision=PRECISIONS[config.precision],
        config=reader.config(),
    )
    stepper.budget = bounded(stepper, config.micro_batch_tokens or TOKENS[parallel.device.type])
    return stepper
