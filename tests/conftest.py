"""What holds for every test of this folder."""

from __future__ import annotations

import gc
import os
import sqlite3
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# How long anything takes says nothing here: the machine may have other work.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_collection_finish() -> None:
    """Leave what was imported and collected out of garbage collections.

    Every training collects garbage when it starts, and looking through two million objects that stay takes it longer
    than the few steps of a test.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def disks_are_not_waited_for() -> Iterator[None]:
    """Tests kill processes but cut no power: nothing that they see depends on what a disk has written.

    What is no open file, and no database, stays an error.
    """
    connect = sqlite3.connect

    def hasty(*args: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*args, **options)
        try:
            connection.execute("PRAGMA synchronous = OFF")
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        patch.setattr(sqlite3, "connect", hasty)
        patch.setattr(sqlite3.dbapi2, "connect", hasty)
        yield
