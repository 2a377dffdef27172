"""Losses over supervised tokens."""
