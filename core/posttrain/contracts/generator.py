"""The generator contract: seeded synthetic rows for `data.synthetic`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Protocol

from posttrain.contracts.component import Config, NoOptions


class Generator(Protocol):
    """Registered under `Group.GENERATOR` as a class with these attributes.

    `format` and `columns` describe the rows. Rows depend on the seed and the options alone.
    """

    config: ClassVar[type[Config]] = NoOptions
    format: ClassVar[str]
    columns: ClassVar[tuple[str, ...]]

    def __call__(self, config: Any, rows: int, seed: int) -> Iterator[Mapping[str, Any]]:
        """Yield `rows` rows."""
