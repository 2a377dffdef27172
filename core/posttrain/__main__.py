"""`python -m posttrain` is the `posttrain` command."""

from posttrain.cli import main

main()
