"""Tables that stages show become tables in MLflow, once, and complete after a resume."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from posttrain_pipelines.tracking.runs import TrackedRun
from posttrain_pipelines.tracking.tables import SHOWN, TAG, table_path, tables_of


def attempt(directory: Path, number: int, *tables: tuple[int, list[dict[str, Any]]]) -> None:
    path = directory / str(number) / "events.jsonl"
    path.parent.mkdir(parents=True)
    events = [
        {"type": "table", "time": 1.0, "name": "completions", "step": step, "rows": rows}
        for step, rows in tables
    ]
    events.append({"type": "metrics", "time": 1.0, "step": 1, "values": {"loss": 1.0}})
    path.write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")


class Client:
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.texts: list[tuple[str, str]] = []
        self.tags: dict[str, str] = {}

    def log_text(self, run: str, text: str, path: str) -> None:
        self.texts.append((path, text))

    def log_batch(self, run: str, tags: list[Any], synchronous: bool) -> None:
        self.tags |= {tag.key: tag.value for tag in tags}


def tracked(client: Client) -> TrackedRun:
    info = SimpleNamespace(run_id="1", status="RUNNING")
    data = SimpleNamespace(tags=dict(client.tags), params={}, metrics={})
    return TrackedRun(client, SimpleNamespace(info=info, data=data, inputs=None, outputs=None))  # type: ignore[arg-type]


def test_a_later_attempt_counts(tmp_path: Path) -> None:
    attempt(tmp_path, 1, (2, [{"prompt": "a", "completion": "x"}]), (4, [{"prompt": "a", "completion": "y"}]))
    attempt(tmp_path, 2, (4, [{"prompt": "a", "completion": "z", "tokens": 3}]))
    found = tables_of(tmp_path, SimpleNamespace(attempts=(1, 2)))  # type: ignore[arg-type]
    assert found == {
        "completions": [
            {"step": 2, "prompt": "a", "completion": "x"},
            {"step": 4, "prompt": "a", "completion": "z", "tokens": 3},
        ]
    }


def test_a_table_is_written_once_for_each_state() -> None:
    client, rows = Client(), [{"step": 2, "prompt": "a"}]
    tracked(client).show({"completions": rows})
    tracked(client).show({"completions": rows})
    ((path, text),) = client.texts
    assert path == table_path("completions") == "tables/completions.json"
    assert json.loads(text) == {"columns": ["step", "prompt"], "data": [[2, "a"]]}
    assert json.loads(client.tags[SHOWN]) == [{"path": path, "type": "table"}]
    assert f"{TAG}completions" in client.tags
    tracked(client).show({"completions": [*rows, {"step": 4, "prompt": "b"}]})
    assert len(client.texts) == 2
