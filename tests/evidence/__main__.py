"""`python -m tests.evidence [NAME [ARGUMENT…]]`: make the evidence of that name, or all of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent

EXPERIMENTS: dict[str, list[list[str]]] = {
    "learning": [[name] for name in ("quickstart", "kto", "reward", "orpo", "prm", "zephyr", "smollm")],
    "startup": [[]],
    "kills": [[]],
    "speed": [[]],
    "handoffs": [[]],
    "data": [[]],
    "equality": [[]],
    "quickstart": [[]],
}
"""Scripts of this directory and the arguments of each run; each writes a page below `docs/evidence/`."""


def main(arguments: list[str]) -> int:
    """Run one experiment, or all of them one after the other."""
    chosen = arguments[:1] or list(EXPERIMENTS)
    if chosen[0] not in EXPERIMENTS:
        print(f"there is no evidence {chosen[0]!r}; there is {', '.join(EXPERIMENTS)}", file=sys.stderr)
        return 2
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    runs = [(name, [arguments[1:]] if arguments[1:] else EXPERIMENTS[name]) for name in chosen]
    commands = [[sys.executable, str(HERE / f"{name}.py"), *given] for name, every in runs for given in every]
    return max(subprocess.run(command, env=environment, check=False).returncode for command in commands)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
