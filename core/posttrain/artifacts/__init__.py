"""Artifacts: what stages exchange."""
