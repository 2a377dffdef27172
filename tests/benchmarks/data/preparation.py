"""A race of preparations: the same rows, tokenizer, template, length and cores; each side in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import preparation_materials as materials
import psutil

from posttrain.execution.environment import worker_environment

HERE = Path(__file__).parent
TESTS = HERE.parents[1]
THREADS = 2
LENGTH = 1024
"""TRL's default."""
OURS, DEFAULT, TWO = "posttrain", "TRL, its defaults", "TRL, two processes"
SIDES: Mapping[str, Mapping[str, Any]] = {
    OURS: {"script": "preparation_ours.py"},
    DEFAULT: {"script": "preparation_trl.py", "masks": True, "processes": None},
    "TRL, its defaults, no masks": {"script": "preparation_trl.py", "masks": False, "processes": None},
    TWO: {"script": "preparation_trl.py", "masks": True, "processes": 2},
}
"""Who takes part. `assistant_only_loss` makes TRL compute masks; unless told otherwise it learns prompts too."""


def race(rows: int, directory: Path) -> dict[str, dict[str, Any]]:
    """Let each side prepare the same rows, one after the other, and return what each told."""
    shutil.rmtree(directory, ignore_errors=True)
    model = materials.model_directory(directory / "model")
    materials.dataset_directory(directory / "data", rows)
    found = {}
    for number, (name, side) in enumerate(SIDES.items()):
        own = directory / f"side-{number}"
        own.mkdir()
        job = {
            **side,
            "rows": rows,
            "length": LENGTH,
            "model": str(model),
            "data": str(directory / "data"),
            "directory": str(own),
        }
        found[name] = _run(job, own)
        shutil.rmtree(own)
    return found


def _run(job: Mapping[str, Any], own: Path) -> dict[str, Any]:
    command = [sys.executable, str(HERE / job["script"]), json.dumps(job)]
    log = own / "log"
    start = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=own, env=_environment(job, own))
        peak = Peak(process.pid)
        code = process.wait()
    wall = time.perf_counter() - start
    told = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("TOLD ")]
    if code or not told:
        raise SystemExit(f"{job['script']} failed:\n{log.read_text(errors='replace')[-3000:]}")
    facts: dict[str, Any] = json.loads(told[0].removeprefix("TOLD "))
    return {**facts, "rate": job["rows"] / facts["seconds"], "peak_mib": peak.end() / 2**20, "wall": wall}


def _environment(job: Mapping[str, Any], own: Path) -> dict[str, str]:
    """What a stage's process gets for ours, what a user's shell has for TRL's: its tokenizers may use threads."""
    roots = [str(TESTS), *(str(TESTS.parent / each) for each in ("core", "plugins", "pipelines"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(roots), "HF_HOME": str(own / "hf")}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TQDM_DISABLE": "1"}
    if "masks" not in job:
        return {**worker_environment(environment, threads=THREADS), "PYTHONPATH": environment["PYTHONPATH"]}
    environment.pop("TOKENIZERS_PARALLELISM", None)
    return {**environment, "OMP_NUM_THREADS": str(THREADS)}


class Peak:
    """Watches how much memory a process and its children hold together, pages of files left out.

    Args:
        pid: The process.
    """

    def __init__(self, pid: int) -> None:
        self._pid, self._most, self._over = pid, 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def end(self) -> int:
        """Stop, and return the most bytes that were seen."""
        self._over.set()
        self._thread.join()
        return self._most

    def _watch(self) -> None:
        while not self._over.wait(0.2):
            try:
                top = psutil.Process(self._pid)
                own = sum(map(_bytes, [top, *top.children(recursive=True)]))
            except psutil.NoSuchProcess:
                continue
            self._most = max(self._most, own)


def _bytes(process: psutil.Process) -> int:
    try:
        with Path(f"/proc/{process.pid}/status").open() as lines:
            values = dict(line.split(":", 1) for line in lines)
    except (OSError, ValueError):
        return 0
    return 1024 * int(values.get("RssAnon", "0 kB").split()[0])
