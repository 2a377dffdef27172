"""A tokenized dataset on disk: `tokens.arrow`, and `prompts.txt` as every dataset has it.

`tokens.arrow` is an Arrow file; a record is one row of the dataset. A row holds one example, or several where it is
packed; an example has a sequence for each of the roles that the schema's metadata lists (`completion`, or `chosen`
and `rejected`). Columns:

    tokens      list<int32>   the tokens of all sequences, one after the other
    supervised  list<bool>    which of them are learned
    lengths     list<int32>   tokens of each sequence
    weights     list<double>  weight of each example
    rows        list<int64>   the row, from 0, of the dataset that each example comes from

Files are read in place (memory-mapped): tokens that nobody looks at take no memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.trainer import Example, TokenSequence
from posttrain.errors import DataError
from posttrain_plugins.data.rows import PROMPTS

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

TOKENS = "tokens.arrow"
COLUMNS = ("tokens", "supervised", "lengths", "weights", "rows")
FORMATS: Mapping[str, tuple[str, ...]] = {
    "tokens": ("completion",),
    "token_pairs": ("chosen", "rejected"),
}
"""The formats of tokenized datasets, and the roles of an example's sequences."""

FLUSH = 1 << 19
"""Tokens after which a batch of records is written."""
_ROLES = b"roles"


def format_name(roles: Sequence[str]) -> str:
    """Return the format of examples with these roles.

    Raises:
        DataError: There is none.
    """
    for name, known in FORMATS.items():
        if tuple(roles) == known:
            return name
    raise DataError(
        "rows of this kind cannot be tokenized ahead",
        found=f"passages {', '.join(roles) or 'none'}",
        expected="; ".join(", ".join(known) for known in FORMATS.values()),
    )


def schema(roles: Sequence[str]) -> pa.Schema:
    """Return the schema of a file whose examples have these roles."""
    import pyarrow as pa

    kinds = (pa.int32(), pa.bool_(), pa.int32(), pa.float64(), pa.int64())
    fields = [
        pa.field(name, pa.list_(pa.field("item", kind, nullable=False)), nullable=False)
        for name, kind in zip(COLUMNS, kinds, strict=True)
    ]
    return pa.schema(fields, metadata={_ROLES: ",".join(roles).encode()})


def record_batch(
    roles: Sequence[str],
    tokens: NDArray[np.int32],
    supervised: NDArray[np.bool_],
    lengths: NDArray[np.int32],
    weights: NDArray[np.float64],
    rows: NDArray[np.int64],
    ends: Sequence[NDArray[np.int32]],
) -> pa.RecordBatch:
    """Put records together from flat columns.

    Args:
        roles: Of each example's sequences.
        tokens: Of all records.
        supervised: Which of these are learned.
        lengths: Tokens of each sequence.
        weights: Of each example.
        rows: Where each example comes from.
        ends: Where each record's tokens, sequences and examples end, each behind a leading 0.
    """
    import pyarrow as pa

    by_token, by_sequence, by_example = map(pa.array, ends)
    columns = [
        (by_token, tokens),
        (by_token, supervised),
        (by_sequence, lengths),
        (by_example, weights),
        (by_example, rows),
    ]
    shape = schema(roles)
    lists = [
        pa.ListArray.from_arrays(ends, pa.array(values), type=column.type)
        for (ends, values), column in zip(columns, shape, strict=True)
    ]
    return pa.record_batch(lists, schema=shape)


class Records:
    """Rows on their way to a file.

    Args:
        roles: Of each example's sequences.
    """

    def __init__(self, roles: Sequence[str]) -> None:
        self.roles = roles
        self._tokens, self._lengths = array("i"), array("i")
        self._supervised = bytearray()
        self._weights, self._rows = array("d"), array("q")
        self._ends = [array("i", [0]) for _ in range(3)]

    @property
    def tokens(self) -> int:
        """How many tokens wait."""
        return len(self._tokens)

    def add(self, examples: Sequence[Example]) -> None:
        """Take in one row: one example, or those of a packed row."""
        for example in examples:
            self._weights.append(example.weight)
            self._rows.append(example.row)
            for sequence in example.sequences:
                self._tokens.extend(sequence.tokens)
                self._supervised += bytes(sequence.supervised)
                self._lengths.append(len(sequence.tokens))
        for ends, held in zip(self._ends, (self._tokens, self._lengths, self._rows), strict=True):
            ends.append(len(held))

    def batch(self) -> pa.RecordBatch:
        """Return the rows as records; there is at least one."""
        import numpy as np

        return record_batch(
            self.roles,
            np.frombuffer(self._tokens, np.int32),
            np.frombuffer(self._supervised, np.bool_),
            np.frombuffer(self._lengths, np.int32),
            np.frombuffer(self._weights, np.float64),
            np.frombuffer(self._rows, np.int64),
            [np.frombuffer(ends, np.int32) for ends in self._ends],
        )


class TokenWriter:
    """Writes a tokenized dataset, a batch of records at a time.

    Args:
        directory: An existing directory to fill.
        roles: Of each example's sequences.
    """

    def __init__(self, directory: Path, roles: Sequence[str]) -> None:
        import pyarrow as pa

        self.roles, self.rows = roles, 0
        self._file = pa.OSFile(str(directory / TOKENS), "wb")
        self._sink = pa.ipc.new_file(self._file, schema(roles))
        self._prompts = (directory / PROMPTS).open("w", encoding="ascii")

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._sink.close()
        self._file.close()
        self._prompts.close()

    def add(self, batch: pa.RecordBatch, prompts: Sequence[str]) -> None:
        """Write records, and for each the line that names its prompts."""
        assert batch.num_rows == len(prompts), "every row has its prompts"
        self._sink.write_batch(batch)
        self._prompts.writelines(f"{line}\n" for line in prompts)
        self.rows += len(prompts)


@dataclass(frozen=True)
class Batch:
    """Records as flat arrays; `ends` hold where each record's tokens, sequences and examples end, behind a 0."""

    tokens: NDArray[np.int32]
    lengths: NDArray[np.int32]
    weights: NDArray[np.float64]
    rows: NDArray[np.int64]
    ends: Sequence[NDArray[np.int32]]
    bits: NDArray[np.uint8]

    def supervised(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Say which of the tokens from `start` up to `stop` are learned."""
        import numpy as np

        first = start // 8
        found = np.unpackbits(self.bits[first : -(-stop // 8)], bitorder="little")
        return found[start - 8 * first : stop - 8 * first].view(np.bool_)


def require_tokenizer(data: Artifact, tokenizer: str, fix: str) -> None:
    """Refuse a tokenized dataset that is known to be of another tokenizer.

    Args:
        data: The dataset.
        tokenizer: Hash of the model's tokenizer.
        fix: What to do about it.

    Raises:
        DataError: The tokens mean something else to the model.
    """
    made = data.facts.tokens
    if made is not None and made.tokenizer not in (None, tokenizer):
        raise DataError(
            "the dataset was tokenized with another tokenizer than the model's",
            found=made.tokenizer,
            expected=tokenizer,
            fix=fix,
        )


class TokenRows:
    """The rows of a tokenized dataset, in place.

    Args:
        directory: Holds `tokens.arrow`.

    Raises:
        DataError: The file is missing or damaged.
    """

    def __init__(self, directory: Path) -> None:
        import pyarrow as pa

        path = directory / TOKENS
        try:
            self._file = pa.ipc.open_file(pa.memory_map(str(path)))
        except (OSError, pa.ArrowInvalid) as error:
            raise DataError(f"the tokenized rows cannot be read: {error}", where=str(path)) from error
        self.roles = tuple(self._file.schema.metadata[_ROLES].decode().split(","))
        self._directory = directory

    @cached_property
    def batches(self) -> list[Batch]:
        """The file, a batch of records at a time."""
        return [self._batch(number) for number in range(self._file.num_record_batches)]

    def _batch(self, number: int) -> Batch:
        import numpy as np

        tokens, supervised, lengths, weights, rows = self._file.get_batch(number).columns
        return Batch(
            tokens=tokens.values.to_numpy(),
            lengths=lengths.values.to_numpy(),
            weights=weights.values.to_numpy(),
            rows=rows.values.to_numpy(),
            ends=[each.offsets.to_numpy() for each in (tokens, lengths, rows)],
            bits=np.frombuffer(supervised.values.buffers()[1], np.uint8),
        )

    def examples(self) -> Iterator[list[Example]]:
        """Return what each row holds. Tokens stay in the file; examples are numbered through, from 0."""
        number, width = 0, len(self.roles)
        for batch in self.batches:
            supervised = batch.supervised(0, len(batch.tokens)).tobytes()
            ends = [0, *batch.lengths.cumsum().tolist()]
            sequences = [
                # An array does all that is asked of a sequence.
                TokenSequence(batch.tokens[start:stop], supervised[start:stop], self.roles[at % width])  # type: ignore[arg-type]
                for at, (start, stop) in enumerate(pairwise(ends))
            ]
            found = [
                Example(number + at, tuple(sequences[at * width : (at + 1) * width]), weight)
                for at, weight in enumerate(batch.weights.tolist())
            ]
            number += len(found)
            yield from (found[first:last] for first, last in pairwise(batch.ends[2].tolist()))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The tokens of each row, all its sequences together."""
        import numpy as np

        return np.concatenate([np.diff(batch.ends[0]).astype(np.int64) for batch in self.batches])

    def prompts(self) -> Iterator[str]:
        """Return the line of each row in `prompts.txt`."""
        with (self._directory / PROMPTS).open(encoding="ascii") as lines:
            for line in lines:
                yield line.rstrip("\n")
