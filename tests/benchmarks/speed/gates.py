"""How a side is driven: it does one timed piece of work when it is told to, and says how long that took.

The driver writes a line to start the next piece and reads a JSON line about it, so that several processes can
take turns and whatever else the machine does hits all of them alike.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

Result = TypeVar("Result")


class Gate:
    """The side's end of the two pipes, whose numbers are the first two arguments of the command."""

    def __init__(self) -> None:
        self._commands = os.fdopen(int(sys.argv[1]), "r")
        self._events = os.fdopen(int(sys.argv[2]), "w")
        self.job: dict[str, Any] = json.loads(self._commands.readline())
        self._began = 0.0, 0.0

    def wait(self, kind: str) -> None:
        """Say what would come next, and start the clock when told to go on."""
        self.tell(at=kind)
        if not self._commands.readline():
            raise SystemExit("the driver is gone")
        self._began = time.perf_counter(), time.process_time()

    def done(self, **facts: Any) -> None:
        """Say how long it took."""
        wall, processor = self._began
        self.tell(seconds=time.perf_counter() - wall, processor=time.process_time() - processor, **facts)

    def timed(self, kind: str, act: Callable[[], Result]) -> Result:
        """Do one piece of work between the two."""
        self.wait(kind)
        result = act()
        self.done()
        return result

    def tell(self, **facts: Any) -> None:
        """Write one event."""
        self._events.write(json.dumps(facts) + "\n")
        self._events.flush()


def memory(name: str) -> int:
    """Return `VmRSS` or `VmHWM` of this process in bytes."""
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None
    return int(found.group(1)) * 1024
