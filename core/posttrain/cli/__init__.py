"""The `posttrain` command."""

from __future__ import annotations


def main() -> None:
    """Run the command line; the entry point of the `posttrain` script."""
    from posttrain.cli.app import run

    run()
