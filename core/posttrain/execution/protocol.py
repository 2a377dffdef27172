"""The stage process protocol: a request file in, an event stream and a result file out.

The same worker entry point serves the launchers and a person: `python -m posttrain.execution request.json`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from posttrain.artifacts.kinds import Kind
from posttrain.contracts.stage import Cell, Level, Verdict

LIVENESS_FD = "POSTTRAIN_LIVENESS_FD"
"""Environment variable: read end of the pipe whose write end only the parent holds."""
LOCK_FD = "POSTTRAIN_LOCK_FD"
"""Environment variable: descriptor of the key's lock, held by parent and worker."""


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Request(_Message):
    """`request.json`: everything a worker needs to run one node. Holds no secret."""

    run: str
    node: str
    uses: str
    attempt: int
    key: str
    config: dict[str, Any]
    inputs: dict[str, list[str]]
    """Artifact digests by port."""
    workspace: str
    work: str
    directory: str
    """The attempt's directory: `events.jsonl`, `result.json`."""
    base: str
    plugins: list[str]
    """Local plugin files."""
    secrets: list[str] = []
    """Names of the environment variables that the stage declared."""
    identities: dict[str, Any] = {}
    """Identities of the stage and its components as the key has them; a worker with other plugins refuses."""
    threads: int | None = None
    device: Literal["cpu", "cuda"] | None = None


class Output(_Message):
    """One sealed output: hashed and fsynced in `store/tmp`, waiting to be committed."""

    port: str
    kind: Kind
    digest: str
    sealed: str


class Result(_Message):
    """`result.json`, written atomically as the worker's last act.

    `traceback` is what the worker wrote of its `error` to its log.
    """

    status: Literal["ok", "failed", "stopped"]
    verdict: Verdict = Verdict.COMPLETED
    outputs: list[Output] = []
    figures: dict[str, float] = {}
    steps: int | None = None
    summary: str = ""
    error: dict[str, Any] | None = None
    traceback: str = ""
    versions: dict[str, str] = {}
    device: str | None = None
    threads: int | None = None


class Progress(_Message):
    """How far a stage is."""

    type: Literal["progress"] = "progress"
    time: float
    done: int
    total: int | None = None
    unit: str = "steps"


class Metrics(_Message):
    """Metrics of one step; a resumed attempt may repeat steps, the later attempt counts."""

    type: Literal["metrics"] = "metrics"
    time: float
    step: int
    values: dict[str, float]


class Table(_Message):
    """Rows to show at one step; a resumed attempt may repeat steps, the later attempt counts."""

    type: Literal["table"] = "table"
    time: float
    name: str
    step: int
    rows: list[dict[str, Cell]]


class Note(_Message):
    """Something a stage says once."""

    type: Literal["note"] = "note"
    time: float
    level: Level = Level.NOTE
    message: str


Event = Annotated[Progress | Metrics | Table | Note, Field(discriminator="type")]
