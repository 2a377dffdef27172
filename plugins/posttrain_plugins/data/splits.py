"""Splits by content: a row's own hash decides where it goes, so it stays there when the file grows."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from posttrain.artifacts.kinds import Kind
from posttrain.artifacts.manifest import canonical
from posttrain.contracts.format import Format
from posttrain.contracts.stage import Port, StageConfig
from posttrain.errors import DataError
from posttrain_plugins.data.rows import first_prompt_hash

REST = "train"
WHOLE = "data"

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DIGITS = 16


def _no_counts(value: Any) -> Any:
    for name, share in value.items() if isinstance(value, Mapping) else ():
        if isinstance(share, int | float) and not isinstance(share, bool) and share >= 1:
            raise ValueError(
                f"{name}: {share} must be a fraction below 1, such as 0.05; with a count, rows would move "
                "between splits whenever the data grows"
            )
    return value


def _fractions(value: dict[str, float] | None) -> dict[str, float] | None:
    if value is None:
        return None
    if not value:
        raise ValueError("name at least one split, for example {test: 0.05}")
    for name, share in value.items():
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name for a split: use letters, digits and underscores")
        if share <= 0:
            raise ValueError(f"{name}: {share} must be above 0")
    if REST in value:
        raise ValueError(f"leave `{REST}` out: it is what the other splits leave")
    if sum(value.values()) >= 1:
        raise ValueError(
            f"the fractions add up to {sum(value.values()):g}, which leaves nothing for `{REST}`"
        )
    return value


Fractions = Annotated[dict[str, float] | None, BeforeValidator(_no_counts), AfterValidator(_fractions)]


class SplitConfig(StageConfig):
    """The options that splits need."""

    split: Fractions = Field(
        default=None,
        description="names to fractions, such as `{test: 0.05}`; the rest is `train`; each becomes an output "
        "port. Without it there is one port, `data`",
    )
    split_by: Literal["row", "prompt", "group"] = Field(
        default="prompt",
        description="what is hashed: the row's prompt (of a conversation its first, of `text` all of it), so "
        "that no prompt is in two splits; the whole row; or a `group` of rows, named by `split_column`",
    )
    split_column: str | None = Field(
        default=None,
        description="with `split_by: group`, the column whose equal values stay together, such as a document",
    )
    split_salt: str | None = Field(
        default=None,
        min_length=1,
        description="any text; another one makes another division. Rows that a split by the same content has already "
        "chosen need one to be split again: without it they would all fall on the same side",
    )

    @model_validator(mode="after")
    def _one_group(self) -> Self:
        if self.split_by == "group" and self.split_column is None:
            raise ValueError(
                "`split_by: group` needs `split_column`, the column that says which rows belong together"
            )
        if self.split_by != "group" and self.split_column is not None:
            raise ValueError("`split_column` belongs to `split_by: group`")
        return self


def split_ports(config: SplitConfig, formats: frozenset[str]) -> tuple[Port, ...]:
    """Return the output ports."""
    return tuple(Port(name, frozenset({Kind.DATASET}), formats) for name in split_names(config.split))


def even_split(split: Mapping[str, float] | None) -> dict[str, float] | None:
    """Return a split into equal parts: with a handful of rows, a small fraction would stay empty."""
    return None if split is None else {name: 1 / (len(split) + 1) for name in split}


def split_names(split: Mapping[str, float] | None) -> tuple[str, ...]:
    """Return the names of the parts, `train` first; `data` alone when nothing is split."""
    return (WHOLE,) if split is None else (REST, *sorted(split))


def divide(
    rows: Sequence[dict[str, Any]], config: SplitConfig, format: str, source: str
) -> dict[str, list[Any]]:
    """Deal rows out to their splits, in their order.

    Raises:
        DataError: A split stays empty.
    """
    parts: dict[str, list[Any]] = {name: [] for name in split_names(config.split)}
    for row in rows:
        parts[part_of(row, config, format)].append(row)
    require_filled({name: len(part) for name, part in parts.items()}, config.split, source)
    return parts


def part_of(row: Mapping[str, Any], config: SplitConfig, format: str | Format) -> str:
    """Return the name of the part that a row belongs to, which nothing but its own content decides.

    Raises:
        DataError: The row lacks the column that rows are grouped by.
    """
    hashed = _hashed(row, config, format)
    return _part(hashed if config.split_salt is None else [config.split_salt, hashed], config.split)


def require_filled(counts: Mapping[str, int], split: Mapping[str, float] | None, source: str) -> None:
    """Refuse a split with a part that has no rows.

    Raises:
        DataError: Such a part, by name.
    """
    for name, count in counts.items():
        if not count:
            share = f" ({split[name]:g} of the rows)" if split and name in split else ""
            raise DataError(
                f"the split `{name}`{share} is empty",
                where=source,
                found=f"{sum(counts.values())} rows",
                fix="give it a larger fraction, or more rows; where a split has chosen these rows already, "
                "a `split_salt`",
            )


def sample(rows: Sequence[Any], limit: int | None) -> list[int]:
    """Choose up to `limit` rows by their content; return their indices in order."""
    if limit is None or limit >= len(rows):
        return list(range(len(rows)))
    # Another hash than that of the splits, or a sample would come from one of them alone.
    ranked = sorted(range(len(rows)), key=lambda index: (uniform(["limit", rows[index]]), index))
    return sorted(ranked[:limit])


def uniform(content: Any) -> float:
    """Map a JSON value to a number in [0, 1) that depends on nothing else."""
    digest = hashlib.sha256(canonical(content)).hexdigest()
    return int(digest[:_DIGITS], 16) / float(16**_DIGITS)


def _hashed(row: Mapping[str, Any], config: SplitConfig, format: str | Format) -> Any:
    """Return what decides where a row goes."""
    if config.split_by == "prompt":
        return first_prompt_hash(row, format)
    if config.split_by == "row":
        return row
    column = str(config.split_column)
    if column not in row:
        raise DataError(
            f"a row has no column `{column}` to split by",
            found=f"columns {', '.join(row)}",
            fix="name another column with `split_column`, or split by prompt",
        )
    return ["group", row[column]]


def _part(content: Any, split: Mapping[str, float] | None) -> str:
    if split is None:
        return WHOLE
    place, edge = uniform(content), 0.0
    # By name: the order of a mapping means nothing, and the key and a run's record do not keep it.
    for name, share in sorted(split.items()):
        edge += share
        if place < edge:
            return name
    return REST
