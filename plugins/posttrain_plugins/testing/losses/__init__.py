"""The conformance suite of losses, check by check."""
