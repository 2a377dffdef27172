"""The ranks of a training as processes of this machine: the stage's own is rank 0, the others are forked from it.

A fork is cheap and has everything at hand, but it has to come before this process computes or touches a GPU. No
rank outlives rank 0, and a rank that fails ends the training with an error that says which and why.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TypeVar

import torch

from posttrain.contracts.backend import Place
from posttrain.contracts.stage import Level, StageContext
from posttrain.errors import PosttrainError, StageError
from posttrain.execution.environment import variables
from posttrain_plugins.launchers.process import FOLDER, Follower, follow

T = TypeVar("T")
Work = Callable[[StageContext, Place], T]

MEETING = "meeting"
VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The variable that says which GPUs a process sees."""
TRIAL = 10.0
"""Seconds that a forked process has to compute something small."""
PATIENCE = 5.0
"""Seconds in which a rank's failure must show after another rank has noticed that something is wrong."""
LAST = 60.0
"""Seconds that other ranks have to end after rank 0 has."""


def together(context: StageContext, ranks: int, work: Work[T]) -> T:
    """Do the same work on every rank and return what it returns on rank 0.

    Args:
        context: The stage's; the other ranks get one that tells nobody anything.
        ranks: How many.
        work: Called with a context and a place on each rank.

    Raises:
        StageError: The ranks cannot be started here, or one of them failed.
    """
    folder = context.work / FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    meeting = folder / MEETING
    shares = _shares(ranks)
    if ranks > 1:
        _require_forkable(shares[0])
    team = Team([], folder, context.note)
    for rank in range(1, ranks):
        place = Place(rank, ranks, meeting)
        team.followers.append(_fork(context, place, work, shares[rank], team))
    with team.watched(), shares[0].taken():
        return team.lead(lambda: work(context, Place(0, ranks, meeting)))


class Share:
    """What one rank may use of the machine.

    Args:
        threads: Threads of numerical libraries.
        gpu: The one GPU that it sees; None leaves what is visible as it is.
    """

    def __init__(self, threads: int, gpu: str | None) -> None:
        self.threads, self.gpu = threads, gpu

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Keep to it in the block."""
        threads = torch.get_num_threads()
        with variables({} if self.gpu is None else {VISIBLE: self.gpu}):
            torch.set_num_threads(self.threads)
            try:
                yield
            finally:
                torch.set_num_threads(threads)

    def take(self) -> None:
        """Keep to it from now on."""
        torch.set_num_threads(self.threads)
        if self.gpu is not None:
            os.environ[VISIBLE] = self.gpu


def _shares(ranks: int) -> list[Share]:
    """Divide threads and GPUs.

    Raises:
        StageError: There are GPUs, but fewer than ranks.
    """
    threads = max(1, torch.get_num_threads() // ranks)
    gpus = _visible_gpus()
    if not gpus:
        return [Share(threads, None) for _ in range(ranks)]
    if len(gpus) < ranks:
        raise StageError(
            "there are more ranks than GPUs",
            where="backend.ranks",
            found=f"{ranks} ranks, {len(gpus)} GPUs",
            fix=f"set ranks to {len(gpus)}, or ask for more under `resources.gpus`",
        )
    return [Share(threads, gpu) for gpu in gpus[:ranks]]


def _visible_gpus() -> list[str]:
    """Return the GPUs of this process without touching one, which would forbid to fork."""
    listed = os.environ.get(VISIBLE)
    if listed is not None:
        return [each.strip() for each in listed.split(",") if each.strip()]
    return [str(number) for number in range(torch.cuda.device_count())]


def _require_forkable(share: Share) -> None:
    """Refuse to fork a process whose children could not compute.

    Where this process has computed with several threads, a child waits for threads that it does not have; where it
    has looked for GPUs, a child can use none. So one is tried.

    Raises:
        StageError: This process has computed already.
    """
    found = "a GPU in use" if torch.cuda.is_initialized() else None
    if found is None and not _tried(share):
        found = "a forked process cannot compute"
    if found is not None:
        raise StageError(
            "several ranks cannot be started from a process that has computed already",
            where="backend",
            found=found,
            expected="a stage process of its own",
            fix="use another runner than `inline`, or `backend: single`",
        )


def _tried(share: Share) -> bool:
    """Say whether a child with this share of the machine can compute."""
    pid = _forked()
    if pid == 0:
        _try(share)
    deadline = time.monotonic() + TRIAL
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def _try(share: Share) -> NoReturn:
    code = 1
    try:
        if share.gpu is None or not torch.cuda._is_in_bad_fork():
            torch.set_num_threads(share.threads)
            square = torch.ones(512, 512)
            (square @ square).sum()
            code = 0
    finally:
        os._exit(code)


def _forked() -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python threads of this process only wait for its parent to go; a child does without them.
        warnings.filterwarnings("ignore", "This process .*multi-threaded", DeprecationWarning)
        return os.fork()


def _fork(context: StageContext, place: Place, work: Work[T], share: Share, team: Team) -> Follower:
    read, write = os.pipe()
    parent = os.getpid()
    pid = _forked()
    if pid == 0:
        for other in (read, *(follower.output for follower in team.followers)):
            os.close(other)
        follow(parent, write, context, place, share.take, work)
    os.close(write)
    return Follower(place.rank, pid, read, context.work / FOLDER)


class Team:
    """Rank 0's view of the other ranks.

    Args:
        followers: The others.
        folder: Where they leave what went wrong.
        note: Tells the person who watches.
    """

    def __init__(self, followers: list[Follower], folder: Path, note: Callable[[str, Level], None]) -> None:
        self.followers, self.folder, self.note = followers, folder, note

    def lead(self, work: Callable[[], T]) -> T:
        """Do rank 0's part.

        Raises:
            StageError: Another rank failed.
        """
        try:
            found = work()
        except PosttrainError:
            raise
        except Exception as error:
            # What rank 0 sees of another rank's end is a broken connection.
            failure = self._failure(PATIENCE if self.followers else 0)
            if failure is None:
                raise
            raise failure from error
        for follower in self.followers:
            if not follower.wait(LAST):
                self.note(f"rank {follower.rank} did not end after the training and is killed", Level.WARNING)
        failure = self._failure(0)
        if failure is not None:
            raise failure
        return found

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Pass on what the others print; end them, if they have not ended, after the block."""
        over = threading.Event()
        for follower in self.followers:
            follower.start(over)
        try:
            yield
        finally:
            over.set()
            for follower in self.followers:
                follower.end()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _failure(self, patience: float) -> StageError | None:
        """Return what went wrong first on another rank, if anything did."""
        deadline = time.monotonic() + patience
        while True:
            failed = [follower for follower in self.followers if follower.failed]
            if failed:
                # A rank that was killed leaves no word; the others then tell of broken connections only.
                first = min(failed, key=lambda follower: (follower.said is not None, follower.when))
                return first.error(len(self.followers) + 1)
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.05)
