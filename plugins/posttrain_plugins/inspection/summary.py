"""The summary in words, the same for a terminal and for a page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from posttrain_plugins.data.formats.values import counted
from posttrain_plugins.inspection.spread import Spread
from posttrain_plugins.inspection.statistics import Statistics
from posttrain_plugins.inspection.views import Inspection, Kept, ModelView, TokenName, Training

Tone = Literal["good", "bad", "warn", "plain"]


@dataclass(frozen=True)
class Line:
    """One line of the summary: what it is about, what there is to say, and how bad that is."""

    name: str
    text: str
    tone: Tone = "plain"


def training_lines(inspection: Inspection) -> Iterator[Line]:
    """Say what training gets of the dataset."""
    training = inspection.training
    unit = "example" if training.examples is not None else "row"
    of = counted(inspection.rows, "row") if inspection.complete else f"the first {inspection.rows} rows"
    limit = "no limit" if training.max_length is None else f"at most {training.max_length} tokens"
    yield Line("trainer", f"{training.trainer}, {limit}, {training.truncation}")
    packed = training.examples is not None
    whole = training.examples if packed else inspection.rows
    told = f"{whole} examples in {of}" if packed else of
    yield Line("usable", f"{training.usable} of {told}", "good" if training.usable == whole else "warn")
    for reason, kept in training.dropped.items():
        yield Line("dropped", f"{_named(kept, unit)}: {reason}", "bad")
    if training.truncated:
        share = training.truncated / (training.usable or 1)
        yield Line(
            "shortened",
            f"{counted(training.truncated, unit)} ({share:.1%}), {counted(training.lost, 'token')} lost",
            "warn",
        )
    else:
        yield Line("shortened", "none", "good")
    if training.straddling:
        yield Line(
            "straddling",
            f"{counted(training.straddling, unit)} with a token that is half prompt, half answer",
            "warn",
        )
    yield Line("learned", f"{training.supervised} of {training.tokens} tokens ({training.share:.1%})")
    yield from _masks(training, unit)
    for kept, remark in training.remarks:
        fix = f" Fix: {remark.fix}" if remark.fix else ""
        yield Line(remark.code, f"{_named(kept)}: {remark.message}.{fix}", "warn")


def _masks(training: Training, unit: str) -> Iterator[Line]:
    if not training.usable:
        return
    if training.masked.count:
        yield Line("fully masked", f"{_named(training.masked, unit)}: nothing of them is learned", "bad")
    else:
        yield Line("fully masked", f"no {unit} that training takes", "good")
    if not training.unmasked.count:
        yield Line("all learned", f"no {unit}", "good")
    elif training.intended:
        yield Line("all learned", f"{counted(training.unmasked.count, unit)}, as they are to be")
    else:
        yield Line("all learned", f"{_named(training.unmasked, unit)}: the prompt is learned too", "bad")


def model_lines(model: ModelView) -> Iterator[Line]:
    """Say what of the model decides how rows are read."""
    yield Line("template", "none; only strings can be encoded" if model.template is None else
               f"{model.template[:16]} (tokens), {str(model.template_text)[:16]} (text)")  # fmt: skip
    yield Line("tokenizer", model.tokenizer[:16])
    yield Line("end of turn", _token(model.end_of_turn))
    yield Line("stops", ", ".join(map(str, model.stops)) or "none", "plain" if model.stops else "bad")
    yield Line("bos · eos · pad", " · ".join(map(_token, (model.bos, model.eos, model.pad))))
    if model.context is not None:
        yield Line("context", f"{model.context} tokens")
    for remark in model.remarks:
        yield Line(remark.code, remark.message + (f" Fix: {remark.fix}" if remark.fix else ""), "warn")


def statistics_lines(statistics: Statistics) -> Iterator[Line]:
    """Say what the dataset is like."""
    whole = statistics.rows or 1
    yield Line("rows", f"{statistics.rows} of format `{statistics.format}`")
    yield Line("columns", ", ".join(_column(name, n, whole) for name, n in statistics.columns.items()))
    if statistics.roles:
        yield Line("messages", ", ".join(f"{count} {role}" for role, count in statistics.roles.items()))
    held = (("with tools", statistics.tools), ("with images", statistics.images))
    if any(count for _, count in held):
        yield Line("rows hold", ", ".join(f"{count} {name}" for name, count in held if count))
    yield Line(
        "duplicates",
        f"{statistics.equal} rows ({statistics.equal / whole:.1%}) equal an earlier one, "
        f"{statistics.asked} ({statistics.asked / whole:.1%}) have an earlier one's prompt",
        "warn" if statistics.equal else "plain",
    )
    if statistics.characters:
        yield Line("characters", _spread(statistics.characters))
    if statistics.turns:
        yield Line("turns", _spread(statistics.turns))
    if statistics.tokens and statistics.tokens.length:
        yield Line("tokens", _spread(statistics.tokens.length))
        yield Line("learned", f"{statistics.tokens.supervised:.1%} of {statistics.tokens.total} tokens")
    longest = ", ".join(
        f"row {row.number} ({row.characters} characters{'' if row.tokens is None else f', {row.tokens} tokens'})"
        for row in statistics.longest
    )
    yield Line("longest", longest)


def charts(statistics: Statistics) -> Iterator[tuple[str, Spread]]:
    """Yield the histograms with something to compare, each with its title."""
    tokens = statistics.tokens
    for title, spread in (
        ("characters of a row", statistics.characters),
        ("messages of a row", statistics.turns),
        ("tokens of a sequence", tokens.length if tokens else None),
        ("percent of a sequence's tokens that are learned", tokens.share if tokens else None),
    ):
        if spread is not None and len(spread.bins) > 1:
            yield title, spread


def _named(kept: Kept, unit: str = "row") -> str:
    more = ", …" if kept.count > len(kept.rows) else ""
    return f"{counted(kept.count, unit)} ({', '.join(map(str, kept.rows))}{more})"


def _token(token: TokenName | None) -> str:
    return "none" if token is None else str(token)


def _column(name: str, count: int, rows: int) -> str:
    return name if count == rows else f"{name} (in {count})"


def _spread(spread: Spread) -> str:
    return (
        f"{spread.least}–{spread.most}, median {spread.median}, mean {spread.mean:.1f}, "
        f"95 % at most {spread.p95}"
    )
