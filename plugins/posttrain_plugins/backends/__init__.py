"""Backends: how the ranks of one training work together."""
