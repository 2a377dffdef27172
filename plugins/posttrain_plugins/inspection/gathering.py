"""Looking at a whole dataset, with the code that training prepares it with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from posttrain.contracts.format import Format
from posttrain.contracts.trainer import Example, Supervise
from posttrain.errors import DataError
from posttrain_plugins.inspection.hints import fix_of
from posttrain_plugins.inspection.models import Model, model_view
from posttrain_plugins.inspection.rows import Recorder, row_view
from posttrain_plugins.inspection.statistics import Census, Sizes
from posttrain_plugins.inspection.views import Inspection, Kept, Remark, RowView, Training
from posttrain_plugins.preparation.accounts import Account, Groups, Refusals
from posttrain_plugins.preparation.examples import CHUNK, Preparation

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Subject:
    """A dataset to look at.

    Args:
        source: How it is called.
        format: The name of its format.
        form: The format.
        rows: Begins to read the rows.
        place: Says where a row stands, by its index.
        limit: Look at this many rows only, the first ones; None for all.
    """

    source: str
    format: str
    form: Format
    rows: Callable[[], Iterable[Row]]
    place: Callable[[int], str]
    limit: int | None = None


@dataclass
class Watch:
    """What is seen while rows go by.

    Args:
        wanted: Indices of the rows to show.
        account: What becomes of rows.
        census: What the rows are like.
        sizes: How long their sequences are.
        masks: Rows by what is odd about their masks.
        views: The rows to show, by index.
    """

    wanted: Collection[int]
    census: Census
    account: Account = field(default_factory=Account)
    sizes: Sizes = field(default_factory=Sizes)
    masks: Groups = field(default_factory=Groups)
    views: dict[int, RowView] = field(default_factory=dict)

    def keep(self, example: Example) -> None:
        """See an example that training takes."""
        self.sizes.add(example)
        if any(not sequence.predicted for sequence in example.sequences):
            self.masks.add(example.row, _MASKED)
        if any(sequence.predicted == len(sequence.tokens) - 1 for sequence in example.sequences):
            self.masks.add(example.row, _UNMASKED)


_MASKED, _UNMASKED = "masked", "unmasked"
_NO_CODES: Mapping[str, str] = {}


def inspect(
    subject: Subject,
    model: Model,
    preparation: Preparation,
    trainer: str,
    wanted: Collection[int],
    *,
    examples_of_trouble: bool = False,
) -> Inspection:
    """Look at a dataset and at some of its rows.

    Args:
        subject: The dataset.
        model: The model.
        preparation: How a trainer takes rows.
        trainer: That trainer's name.
        wanted: Indices of the rows to show.
        examples_of_trouble: Whether to show the first row too that is left out for each reason.
    """
    watch, recorder = Watch(wanted, Census(subject.format)), Recorder(preparation.encoder)
    listening = replace(preparation, encoder=recorder)
    waiting = iter(subject.rows())
    taken = waiting if subject.limit is None else islice(waiting, subject.limit)
    first = 0
    while chunk := list(islice(taken, CHUNK)):
        _see(subject, listening, chunk, first, watch, examples_of_trouble)
        first += len(chunk)
    return Inspection(
        source=subject.source,
        format=subject.format,
        rows=first,
        complete=next(waiting, None) is None,
        statistics=watch.census.statistics(watch.sizes),
        model=model_view(model),
        training=training_of(
            trainer,
            preparation.max_length,
            preparation.truncation,
            watch,
            intended=subject.format == "text" or preparation.supervise is Supervise.EVERYTHING,
            codes=recorder.codes,
        ),
        shown=tuple(watch.views[index] for index in sorted(watch.views)),
    )


def training_of(
    trainer: str,
    max_length: int | None,
    truncation: str,
    watch: Watch,
    *,
    intended: bool,
    codes: Mapping[str, str] = _NO_CODES,
    examples: int | None = None,
) -> Training:
    """Return what training gets, from what was seen.

    Args:
        trainer: The trainer's name.
        max_length: Its longest sequence, in tokens; None for no limit.
        truncation: What becomes of longer ones.
        watch: What was seen.
        intended: Whether everything is to be learned.
        codes: The codes of notes, by their messages.
        examples: How many examples there are where rows hold several.
    """
    account = watch.account
    return Training(
        trainer=trainer,
        max_length=max_length,
        truncation=truncation,
        usable=account.kept,
        dropped={reason: _kept(account.left_out, reason) for reason, _ in account.dropped.most_common()},
        truncated=account.truncated,
        lost=account.lost,
        straddling=account.straddling,
        tokens=account.tokens,
        supervised=account.supervised,
        masked=_kept(watch.masks, _MASKED),
        unmasked=_kept(watch.masks, _UNMASKED),
        intended=intended,
        examples=examples,
        remarks=tuple(_remarks(account.remarks, codes)),
    )


def _see(
    subject: Subject, preparation: Preparation, chunk: list[Row], first: int, watch: Watch, trouble: bool
) -> None:
    known = set(watch.account.left_out.first)
    for example in _examples(preparation, chunk, first, watch.account):
        watch.keep(example)
    for row in chunk:
        watch.census.add(row, _said(subject.form, row))
    shown = {index for index in watch.wanted if first <= index < first + len(chunk)}
    if trouble:
        reasons = watch.account.left_out.first
        shown |= {reasons[reason][0] - 1 for reason in reasons if reason not in known}
    for index in shown:
        row = chunk[index - first]
        watch.views[index] = row_view(preparation, subject.form, row, index, subject.place(index))


def _examples(preparation: Preparation, rows: list[Row], first: int, account: Account) -> Iterator[Example]:
    """Yield what training takes of some rows. Rows that would stop it are counted as left out."""
    part = Account()
    yield from preparation.examples(rows, part, first)
    part.left_out.take(part.refused.groups, "training stops: {}".format)
    part.refused = Refusals()
    account.take(part)


def _said(form: Format, row: Row) -> Any:
    try:
        return form.passages(row)
    except DataError:
        return ()  # counted by `_examples` with its reason


def _remarks(groups: Groups, codes: Mapping[str, str]) -> Iterator[tuple[Kept, Remark]]:
    for text, _ in groups.counts.most_common():
        code = codes.get(text, "note")
        yield _kept(groups, text), Remark(code, text, None, fix_of(code))


def _kept(groups: Groups, text: str) -> Kept:
    return Kept(groups.counts[text], tuple(groups.first.get(text, ())))
