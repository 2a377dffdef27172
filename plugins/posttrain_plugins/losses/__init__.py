"""Losses by family: one pure function a file."""
