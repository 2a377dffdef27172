"""Our side: `data.tokenize` and `data.pack`, as a stage's process runs them."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

KEPT = ("rows", "documents", "tokens", "supervised", "rows_truncated", "efficiency")


class Context:
    """As much of a stage's context as the two stages ask for.

    Args:
        directory: Where the output goes.
        config: The options.
        inputs: Artifacts by port.
    """

    stopping = False

    def __init__(self, directory: Path, config: Any, inputs: dict[str, Any]) -> None:
        self.directory, self.config, self.inputs, self.facts = directory, config, inputs, None
        directory.mkdir(parents=True)

    def input(self, port: str) -> Any:
        return self.inputs[port]

    def output(self, port: str) -> Path:
        return self.directory

    def describe(self, port: str, kind: Any, facts: Any) -> None:
        self.facts = facts

    def progress(self, done: int, total: int | None, unit: str) -> None:
        pass

    def note(self, message: str, level: Any = None) -> None:
        print(message)


def main(job: dict[str, Any]) -> None:
    """Prepare the dataset and print what that came to."""
    from posttrain.artifacts.kinds import DatasetFacts, Kind, PolicyFacts
    from posttrain.artifacts.manifest import Artifact, Manifest
    from posttrain.contracts.registration import load_target
    from posttrain_plugins.data.pack import Pack
    from posttrain_plugins.data.tokenize import Tokenize

    def artifact(directory: Path, kind: Kind, facts: Any) -> Artifact:
        manifest = Manifest(kind=kind, facts=facts, files=())
        return Artifact(manifest.digest, manifest, directory)

    data = artifact(Path(job["data"]), Kind.DATASET, DatasetFacts(format="messages", rows=job["rows"]))
    model = artifact(Path(job["model"]), Kind.MODEL, PolicyFacts(context=job["length"]))
    seconds: dict[str, float] = {}
    figures: dict[str, float] = {}
    for name, stage, ports in (("tokenize", Tokenize, {"model": model}), ("pack", Pack, {})):
        context = Context(Path(job["directory"]) / name, stage.config(), {"data": data, **ports})
        start = time.perf_counter()
        figures |= load_target(stage.target)(context).figures
        seconds[name] = time.perf_counter() - start
        data = artifact(context.directory, Kind.DATASET, context.facts)
    told = {"seconds": sum(seconds.values()), "parts": seconds, **{name: figures[name] for name in KEPT}}
    print("TOLD " + json.dumps(told), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
