"""From sealed outputs to committed artifacts and the record of what the key gave."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from posttrain.artifacts.manifest import Provenance
from posttrain.artifacts.store import KeyRecord, Store
from posttrain.execution.binding import Bound
from posttrain.execution.protocol import Result


def commit(store: Store, bound: Bound, result: Result, run: str, seconds: float) -> KeyRecord:
    """Commit every output, then record the key. A kill in between loses nothing that was made.

    Raises:
        StoreError: An output is not what its manifest says, or cannot be written.
    """
    created = datetime.now(UTC).isoformat(timespec="seconds")
    outputs = {}
    for output in result.outputs:
        provenance = Provenance(
            stage=bound.node.uses,
            node=bound.node.name,
            port=output.port,
            key=bound.key,
            run=run,
            parents={port: tuple(digests) for port, digests in bound.digests.items()},
            sources=bound.ingredients["sources"],
            seed=getattr(bound.node.config, "seed", None),
            config=bound.options,
            versions=result.versions,
            device=result.device,
            threads=result.threads,
            created=created,
        )
        outputs[output.port] = store.commit(Path(output.sealed), provenance).digest
    record = KeyRecord(
        key=bound.key,
        uses=bound.node.uses,
        node=bound.node.name,
        run=run,
        ingredients=bound.ingredients,
        outputs=outputs,
        status=result.verdict.value,
        figures=result.figures,
        summary=result.summary,
        seconds=seconds,
        versions=result.versions,
        device=result.device,
        threads=result.threads,
        created=created,
        pipeline=bound.node.pipeline,
    )
    store.record(record)
    return record
