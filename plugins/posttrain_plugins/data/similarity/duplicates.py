"""Equal and nearly equal rows: exact ones by hash, near ones by MinHash, each verified.

A row is dropped only as the copy of one that is kept, and only when their true Jaccard similarity reaches the
threshold in every part: in the prompt, in the answer, in the turns of each role. So rows that share a long prompt
and differ in a short answer stay both, as do preference pairs whose answers are swapped. What is no text (labels,
tools, images) must be equal.

Broder, On the resemblance and containment of documents, 1997; Lee et al., https://arxiv.org/abs/2107.06499.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from posttrain.artifacts.manifest import digest_of
from posttrain.errors import DataError
from posttrain_plugins.data.problems import at_row
from posttrain_plugins.data.similarity.shingles import ROW, Content, Hasher, chosen, content_of, folded

if TYPE_CHECKING:
    from numpy.typing import NDArray

Row = Mapping[str, Any]

LIBRARY = "datasketch"
_FOUND = 0.99
"""How likely a pair whose similarity is just the threshold is to be looked at."""
_DOUBT = 4.0
"""Standard deviations by which an estimated similarity may be too low before a pair is left out."""


@dataclass(frozen=True)
class Rule:
    """What makes rows copies of each other.

    Args:
        on: `row`, `prompt`, or the name of a column.
        fold: Whether case and white space mean nothing.
        threshold: Least Jaccard similarity of near copies; None finds equal rows only.
        characters: Whether shingles are of characters rather than of words.
        size: Words or characters in a shingle.
        permutations: Hash functions of a MinHash.
        seed: Which hash functions.
    """

    on: str = ROW
    fold: bool = True
    threshold: float | None = 0.8
    characters: bool = False
    size: int = 5
    permutations: int = 128
    seed: int = 0


@dataclass(frozen=True)
class Copy:
    """A row that is left out.

    Args:
        row: Its place, from 0.
        of: The place of the row that is kept.
        similarity: The least Jaccard similarity of their parts; 1 for equal rows.
        equal: Whether it equals a row that is kept or was left out before, rather than being near one.
    """

    row: int
    of: int
    similarity: float
    equal: bool


@dataclass(frozen=True)
class Bands:
    """How a MinHash is cut for the look-up: a pair is looked at when all hashes of one band agree."""

    count: int
    rows: int

    @classmethod
    def of(cls, threshold: float, permutations: int) -> Bands:
        """Return the longest bands with which a pair at the threshold is hardly ever missed.

        Raises:
            DataError: There are too few permutations for that.
        """
        for rows in range(permutations, 0, -1):
            count = permutations // rows
            if 1 - (1 - threshold**rows) ** count >= _FOUND:
                return cls(count, rows)
        raise DataError(
            "too few permutations to find near copies reliably",
            found=f"{permutations} permutations at a threshold of {threshold:g}",
            fix="raise `permutations` or `threshold`",
        )


def find_copies(
    rows: Iterable[Row], format: str, rule: Rule, progress: Callable[[int], None] = lambda done: None
) -> list[Copy]:
    """Find the rows that are copies of others; each kept row is the one whose content hashes lowest.

    So which rows are kept does not depend on their order. Rows are read once; in memory stay the hashed shingles,
    about as much as the text, and 8 bytes for each permutation and row.

    Raises:
        DataError: A row lacks the column, or there are too few permutations.
    """
    sketches: list[_Sketch] = []
    order: dict[bytes, list[tuple[str, int]]] = {}
    near = _Near.of(rule)
    for place, row in enumerate(rows):
        try:
            identity = _identity(row, format, rule)
        except DataError as error:
            raise at_row(error, place) from error
        order.setdefault(identity, []).append((digest_of(row), place))
        if near is not None:
            sketches.append(near.sketch(content_of(row, format, rule.on)))
        progress(place + 1)
    firsts: list[tuple[str, int]] = []
    copies: list[tuple[int, int]] = []
    for equals in order.values():
        first, *others = sorted(equals)
        firsts.append(first)
        copies.extend((other, first[1]) for _, other in others)
    nearest = {} if near is None else near.copies([place for _, place in sorted(firsts)], sketches)
    found = [Copy(place, of, similarity, equal=False) for place, (of, similarity) in nearest.items()]
    for place, of in copies:
        kept, similarity = nearest.get(of, (of, 1.0))
        found.append(Copy(place, kept, similarity, equal=True))
    return sorted(found, key=lambda copy: copy.row)


def _identity(row: Row, format: str, rule: Rule) -> bytes:
    """Hash what rows must have in common to be equal."""
    compared = chosen(row, format, rule.on)
    return bytes.fromhex(digest_of(folded(compared) if rule.fold else compared))


@dataclass(frozen=True)
class _Sketch:
    """A row's shingles.

    Args:
        kind: Hash of its parts' names and of everything that is no text: near copies have it in common.
        parts: The sorted hashes of each part's shingles.
        minimum: The hash values of its MinHash, shape (permutations,).
    """

    kind: str
    parts: tuple[NDArray[Any], ...]
    minimum: NDArray[Any]


@dataclass
class _Near:
    """Finds near copies."""

    threshold: float
    bands: Bands
    hasher: Hasher
    permutations: int
    seed: int
    _empty: Any = field(init=False)

    def __post_init__(self) -> None:
        self._empty = _library().MinHash(self.permutations, seed=self.seed, hashfunc=int, scheme="affine64")

    @classmethod
    def of(cls, rule: Rule) -> _Near | None:
        if rule.threshold is None:
            return None
        hasher = Hasher(rule.size, characters=rule.characters)
        bands = Bands.of(rule.threshold, rule.permutations)
        return cls(rule.threshold, bands, hasher, rule.permutations, rule.seed)

    def sketch(self, content: Content) -> _Sketch:
        paths = sorted(content.texts)
        parts = tuple(self.hasher.shingles("\n".join(content.texts[path])) for path in paths)
        minhash = self._empty.copy()
        for path, part in zip(paths, parts, strict=True):
            minhash.update_batch((part ^ _salt(path)).tolist())
        named = [[path, bool(len(part))] for path, part in zip(paths, parts, strict=True)]
        return _Sketch(digest_of([named, content.rest]), parts, minhash.hashvalues)

    def copies(self, order: Sequence[int], sketches: Sequence[_Sketch]) -> dict[int, tuple[int, float]]:
        """Go through rows in order and keep each that is near none of those kept before.

        Returns:
            For each row that is not kept, the most similar of the kept ones that were before it.
        """
        index = _library().MinHashLSH(num_perm=self.permutations, params=(self.bands.count, self.bands.rows))
        kept: list[int] = []
        found = {}
        for place in order:
            sketch = sketches[place]
            if not any(len(part) for part in sketch.parts):
                continue
            minhash = self._empty.copy()
            minhash.hashvalues = sketch.minimum
            candidates = [kept[number] for number in sorted(index.query(minhash))]
            nearest = self._nearest(sketch, candidates, sketches)
            if nearest is None:
                index.insert(len(kept), minhash, check_duplication=False)
                kept.append(place)
            else:
                found[place] = nearest
        return found

    def _nearest(
        self, sketch: _Sketch, candidates: Sequence[int], sketches: Sequence[_Sketch]
    ) -> tuple[int, float] | None:
        """Return the most similar of the candidates and its similarity, the first of several; None if none is near."""
        import numpy

        candidates = [place for place in candidates if sketches[place].kind == sketch.kind]
        if not candidates:
            return None
        minima = numpy.stack([sketches[place].minimum for place in candidates])
        estimates = (minima == sketch.minimum).mean(axis=1)
        doubt = _DOUBT * (self.threshold * (1 - self.threshold) / self.permutations) ** 0.5
        close = [candidates[i] for i in numpy.flatnonzero(estimates >= self.threshold - doubt)]
        if not close:
            return None
        similar = _similarities(sketch, [sketches[place] for place in close])
        best = int(similar.argmax())
        return (close[best], float(similar[best])) if similar[best] >= self.threshold else None


def _similarities(one: _Sketch, others: Sequence[_Sketch]) -> NDArray[Any]:
    """Return the least Jaccard similarity of the parts of a row and each of the others, shape (others,)."""
    import numpy

    least = numpy.ones(len(others))
    for number, mine in enumerate(one.parts):
        if not len(mine):
            continue  # nor have the others, which are of one kind with it
        theirs = [other.parts[number] for other in others]
        lengths = numpy.array([len(each) for each in theirs])
        flat = numpy.concatenate(theirs)
        shared = mine[numpy.searchsorted(mine, flat).clip(max=len(mine) - 1)] == flat
        both = numpy.add.reduceat(shared, lengths.cumsum() - lengths, dtype=numpy.int64)
        least = numpy.minimum(least, both / (len(mine) + lengths - both))
    return least


def _library() -> Any:
    try:
        import datasketch
    except ModuleNotFoundError as error:
        raise DataError(
            f"near copies are found with `{LIBRARY}`, which is not installed",
            fix=f"install {LIBRARY}, or look for equal rows alone",
        ) from error
    return datasketch


def _salt(path: tuple[str, ...]) -> Any:
    import numpy

    return numpy.uint64(int(digest_of(path)[:16], 16))
