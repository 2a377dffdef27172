"""What the store remembers of earlier builds. A damaged record is told and passed over."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.artifacts.store import KeyRecord, Store
from posttrain.errors import StoreError
from posttrain.planning.nodes import Node


@dataclass(frozen=True)
class Past:
    """The key records that can be read.

    Args:
        records: The records.
        damaged: A warning for each one that cannot be read.
    """

    records: tuple[KeyRecord, ...]
    damaged: tuple[str, ...]

    @classmethod
    def of(cls, store: Store) -> Past:
        """Read all records of a store; one that is damaged concerns only who needs that very key."""
        records: list[KeyRecord] = []
        damaged: list[str] = []
        for key in store.record_keys():
            try:
                record = store.lookup(key)
            except (StoreError, OSError):
                damaged.append(f"key record {key[:12]} is damaged, `posttrain store gc` removes it")
            else:
                records.extend([record] if record is not None else [])
        return cls(tuple(records), tuple(damaged))

    def newest(self) -> dict[str, KeyRecord]:
        """Return the newest record of every node name."""
        return {record.node: record for record in sorted(self.records, key=_made)}

    def last(self, node: Node) -> KeyRecord | None:
        """Return what the same node of the same pipeline gave last; another pipeline's says nothing about it."""
        same = [each for each in self.records if _site(each) == (node.pipeline, node.name, node.uses)]
        return max(same, key=_made, default=None)


def _made(record: KeyRecord) -> str:
    return record.created


def _site(record: KeyRecord) -> tuple[str | None, str, str]:
    return record.pipeline, record.node, record.uses
