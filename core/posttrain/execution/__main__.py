"""Run one stage by hand or from a launcher: `python -m posttrain.execution request.json`."""

from __future__ import annotations

import sys

from posttrain.execution.worker import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
