"""What `data.tokenize` does: chunks of lines in, batches of records out, in bounded memory."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from threading import local
from typing import TYPE_CHECKING, TypeVar

from posttrain.artifacts.kinds import Kind
from posttrain.contracts.stage import Outcome, StageContext
from posttrain.execution.environment import variables
from posttrain_plugins.data.rows import PROMPTS, ROWS
from posttrain_plugins.data.tokenize import MADE, TokenizeConfig, token_facts
from posttrain_plugins.data.tokens.token_rows import FORMATS, Records, TokenWriter
from posttrain_plugins.preparation.accounts import Account
from posttrain_plugins.preparation.dataset import named_format
from posttrain_plugins.preparation.examples import CHUNK, Preparation, require_rows
from posttrain_plugins.stopping import pauses
from posttrain_plugins.templates.encoder import Encoder

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Lines:
    """Some rows of a dataset as they are in its file.

    Args:
        first: The index of the first one.
        rows: A JSON object each.
        prompts: The hashes of each row's prompts.
    """

    first: int
    rows: Sequence[bytes]
    prompts: Sequence[str]


@dataclass(frozen=True)
class Tokenized:
    """What became of some rows: records, or None where none stayed, and the prompts of each."""

    batch: pa.RecordBatch | None
    prompts: Sequence[str]
    account: Account


def run(context: StageContext) -> Outcome:
    """Tokenize the dataset of port `data` for the model of port `model`.

    Raises:
        DataError: A row cannot be encoded, or none can be trained on.
        Interrupted: The stage was asked to stop.
    """
    config: TokenizeConfig = context.config
    source, model = context.input("data"), context.input("model")
    roles = FORMATS[MADE[source.facts.format]]
    account, work = Account(), Workers(partial(_work, context, config), roles)
    pause = pauses(context, "rows", "tokenizing")
    with tokenizer_threads(), TokenWriter(context.output("data"), roles) as writer:
        for done in ahead(work, read_lines(source.path), threads()):
            account.take(done.account)
            if done.batch is not None:
                writer.add(done.batch, done.prompts)
            pause(account.rows, source.facts.rows)
        rows = writer.rows
    require_rows(account, config.max_length or model.facts.context)
    context.describe("data", Kind.DATASET, token_facts(config, source.facts, model.facts, rows))
    for level, text in account.notes:
        context.note(text, level)
    figures = {**account.figures, "tokens": float(account.tokens), "supervised": float(account.supervised)}
    share = account.supervised / account.tokens
    summary = f"{rows} rows, {account.tokens} tokens, {share:.0%} of them supervised"
    return Outcome(figures=figures, summary=summary)


def ahead(work: Callable[[T], R], parts: Iterable[T], threads: int) -> Iterator[R]:
    """Do the same work on parts in several threads and yield the results in order.

    Only a few parts are under way or done ahead of the one that is asked for, so that memory is bounded.
    """
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[Future[R]] = deque()
        try:
            for part in parts:
                waiting.append(pool.submit(work, part))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


class Workers:
    """Tokenizes rows in any thread: each has an encoder of its own.

    Args:
        make: Returns how rows become examples.
        roles: Of each example's sequences.
    """

    def __init__(self, make: Callable[[], Preparation], roles: Sequence[str]) -> None:
        self._make, self._roles, self._own = make, roles, local()

    def __call__(self, lines: Lines) -> Tokenized:
        """Tokenize some rows."""
        if not hasattr(self._own, "work"):
            self._own.work = self._make()
        return tokenized(self._own.work, lines, self._roles)


def threads() -> int:
    """Return how many threads this stage may use."""
    granted = os.environ.get("OMP_NUM_THREADS", "")
    return int(granted) if granted.isdigit() and int(granted) else 1


@contextmanager
def tokenizer_threads() -> Iterator[None]:
    """Let tokenizers use the threads of this stage.

    They may not elsewhere, as processes are forked there; nothing forks in the block.
    """
    wanted = {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(threads())}
    with variables(wanted):
        yield


def read_lines(directory: Path) -> Iterator[Lines]:
    """Read a dataset a few hundred rows at a time."""
    first = 0
    with (
        (directory / ROWS).open("rb") as rows,
        (directory / PROMPTS).open(encoding="ascii") as prompts,
    ):
        while chunk := list(islice(rows, CHUNK)):
            yield Lines(first, chunk, [line.rstrip("\n") for line in islice(prompts, len(chunk))])
            first += len(chunk)


def tokenized(work: Preparation, lines: Lines, roles: Sequence[str]) -> Tokenized:
    """Tokenize some rows."""
    account, records, prompts = Account(), Records(roles), []
    for example in work.examples(map(json.loads, lines.rows), account, lines.first):
        records.add([example])
        prompts.append(lines.prompts[example.row - lines.first])
    return Tokenized(records.batch() if prompts else None, prompts, account)


def _work(context: StageContext, config: TokenizeConfig) -> Preparation:
    source, model = context.input("data"), context.input("model")
    return Preparation(
        named_format(context, source.facts.format).passages,
        Encoder.open(model.path),
        config.max_length or model.facts.context,
        config.truncation,
        config.weight_column,
        config.supervise,
    )
