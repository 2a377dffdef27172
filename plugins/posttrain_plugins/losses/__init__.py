"""Losses: one pure function a file."""
