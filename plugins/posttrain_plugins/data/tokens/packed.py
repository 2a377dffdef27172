"""What `data.pack` does: a plan from lengths alone, then rows gathered from the file of documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from posttrain.artifacts.kinds import Kind
from posttrain.contracts.stage import Level, Outcome, StageContext
from posttrain.errors import DataError
from posttrain_plugins.data.pack import PackConfig, packed_facts, row_length
from posttrain_plugins.data.tokens.documents import Documents
from posttrain_plugins.data.tokens.packing import Piece, best_fit, efficiency, split, wrap
from posttrain_plugins.data.tokens.token_rows import FLUSH, TokenRows, TokenWriter
from posttrain_plugins.stopping import pauses

Row = Sequence[Piece]
"""The pieces that share a row."""
Plan = Callable[[Documents, int, bool], list[Row]]
"""(documents, tokens of a row, whether answers may stand without their prompts) → rows."""


def run(context: StageContext) -> Outcome:
    """Pack the documents of port `data`.

    Raises:
        DataError: A document is longer than a row and must not be cut, or a cut would part an answer from its prompt.
    """
    config: PackConfig = context.config
    facts = context.input("data").facts
    documents = Documents(TokenRows(context.input("data").path))
    capacity = row_length(config, facts)
    if capacity is None:
        raise DataError("nothing says how long a row is to be", where="data.pack", fix="set `length`")
    rows = _ordered(STRATEGIES[config.strategy](documents, capacity, config.orphans))
    if not rows:
        raise DataError("no document has a piece to learn from", where="data.pack", fix="use longer rows")
    prompts, pause = list(documents.rows.prompts()), pauses(context, "rows", "packing")
    with TokenWriter(context.output("data"), documents.rows.roles) as writer:
        for part in _parts(rows):
            writer.add(documents.gather(part), [_prompts(row, prompts) for row in part])
            pause(writer.rows, len(rows))
    context.describe("data", Kind.DATASET, packed_facts(config, facts, len(rows)))
    figures = _figures(documents, rows, capacity)
    for text in _notes(figures):
        context.note(text, Level.WARNING)
    summary = f"{len(documents.lengths)} documents in {len(rows)} rows of {capacity} tokens"
    return Outcome(figures=figures, summary=f"{summary}, {figures['efficiency']:.1%} full")


def _best_fit(documents: Documents, capacity: int, orphans: bool) -> list[Row]:
    longest = max(documents.lengths, default=0)
    if longest > capacity:
        raise DataError(
            "a document is longer than a row",
            where=f"row {documents.lengths.index(longest) + 1}",
            found=f"{longest} tokens",
            expected=f"at most {capacity}",
            fix="raise `length`, lower max_length of `data.tokenize`, or use `strategy: split`",
        )
    return [list(map(documents.whole, row)) for row in best_fit(documents.lengths, capacity)]


def _split(documents: Documents, capacity: int, orphans: bool) -> list[Row]:
    pieces = [piece for piece in split(documents.lengths, capacity) if _usable(documents, piece, orphans)]
    return [[pieces[number] for number in row] for row in best_fit([p.size for p in pieces], capacity)]


def _wrap(documents: Documents, capacity: int, orphans: bool) -> list[Row]:
    rows = wrap(documents.lengths, capacity)
    tails = (piece.document for row in rows for piece in row if piece.start)
    parted = next((tail for tail in tails if not orphans and documents.prompted(tail)), None)
    if parted is not None:
        raise DataError(
            "`wrap` would part an answer from its prompt",
            where=f"row {parted + 1}",
            fix="use `strategy: best_fit`, or `orphans: true` to have such pieces learned without their prompts",
        )
    kept = [[piece for piece in row if _usable(documents, piece, True)] for row in rows]
    return [row for row in kept if row]


STRATEGIES: Mapping[str, Plan] = {"best_fit": _best_fit, "split": _split, "wrap": _wrap}


def _usable(documents: Documents, piece: Piece, orphans: bool) -> bool:
    """Whether a piece is worth a place: the rest of an answer may be unwanted, and a prompt alone teaches nothing."""
    if piece.size == documents.lengths[piece.document]:
        return True
    if piece.start and not orphans and documents.prompted(piece.document):
        return False
    return documents.learned(piece) > 0


def _ordered(rows: list[Row]) -> list[Row]:
    """Order rows by the first document of each, so that packing does not sort the dataset by length."""
    own = [sorted(row, key=lambda piece: (piece.document, piece.start)) for row in rows]
    return sorted(own, key=lambda row: (row[0].document, row[0].start))


def _parts(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Cut rows into parts of a bounded number of tokens."""
    part: list[Row] = []
    held = 0
    for row in rows:
        part.append(row)
        held += sum(piece.size for piece in row)
        if held >= FLUSH:
            yield part
            part, held = [], 0
    if part:
        yield part


def _prompts(row: Row, prompts: Sequence[str]) -> str:
    """Join the hashes of what a row holds."""
    return " ".join(dict.fromkeys(prompts[piece.document] for piece in row))


def _figures(documents: Documents, rows: Sequence[Row], capacity: int) -> dict[str, float]:
    pieces = [piece for row in rows for piece in row]
    tokens = sum(piece.size for piece in pieces)
    parts: dict[int, int] = {}
    for piece in pieces:
        if piece.size < documents.lengths[piece.document]:
            parts[piece.document] = parts.get(piece.document, 0) + documents.learned(piece)
    unused = set(range(len(documents.lengths))).difference(piece.document for piece in pieces)
    cut = {**dict.fromkeys(unused, 0), **parts}
    unlearned = sum(documents.learned(documents.whole(each)) - left for each, left in cut.items())
    return {
        "rows": float(len(rows)),
        "documents": float(len(documents.lengths)),
        "efficiency": efficiency(tokens, len(rows), capacity),
        "documents_cut": float(len(cut)),
        "tokens_lost": float(sum(documents.lengths) - tokens),
        "answer_tokens_lost": float(unlearned),
    }


def _notes(figures: Mapping[str, float]) -> Iterator[str]:
    if figures["documents_cut"]:
        yield (
            f"{figures['documents_cut']:.0f} of {figures['documents']:.0f} documents were cut; "
            f"{figures['tokens_lost']:.0f} tokens are left out, and {figures['answer_tokens_lost']:.0f} tokens of "
            "answers are not learned: those of pieces left out, and the first of each piece"
        )
