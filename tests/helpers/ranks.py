"""Work on several ranks. Ranks are forked before anything is computed, so a server that only imports forks rank 0."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "OMP_NUM_THREADS": "2",
    "MKL_NUM_THREADS": "2",
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *(path for path in sys.path if path)]),
}

PRELOADED = ["helpers.rank_work", "posttrain_plugins.training.stage", "posttrain_plugins.backends.zero"]
"""What is slow to import and computes nothing: once for all processes, and not for those that only collect tests."""


def in_own_process(
    function: Callable[..., Any],
    *arguments: Any,
    seconds: float = 240,
    enough: Callable[[], bool] = lambda: False,
) -> Any:
    """Call a function of a helper module in a process that has computed nothing, and return what it returns.

    What it raises is raised here. As soon as there is `enough`, the process is killed and None returned.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(theirs, function, arguments))
    with _environment():
        process.start()
    theirs.close()
    try:
        deadline = time.monotonic() + seconds
        while not ours.poll(0.1):
            if enough():
                return None
            assert time.monotonic() < deadline, f"{function.__name__} took more than {seconds} s"
        found = ours.recv()
    finally:
        process.kill()
        process.join()
        ours.close()
    if isinstance(found, Exception):
        raise found
    return found


def _call(channel: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        channel.send(function(*arguments))
    except Exception as error:  # noqa: BLE001 - it is raised again where the result is waited for
        error.add_note(traceback.format_exc())
        channel.send(error)


@contextmanager
def _environment() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
