"""`python -m tests.evidence [NAME [ARGUMENT…]]`: make the evidence of that name, or all of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent

EXPERIMENTS = ("learning", "kills")
"""Scripts of this directory; each writes a page and its figures below `docs/evidence/`."""


def main(arguments: list[str]) -> int:
    """Run one experiment, or all of them one after the other."""
    chosen = arguments[:1] or list(EXPERIMENTS)
    if chosen[0] not in EXPERIMENTS:
        print(f"there is no evidence {chosen[0]!r}; there is {', '.join(EXPERIMENTS)}", file=sys.stderr)
        return 2
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    commands = [[sys.executable, str(HERE / f"{name}.py"), *arguments[1:]] for name in chosen]
    return max(subprocess.run(command, env=environment, check=False).returncode for command in commands)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
