"""Losses of models that judge steps."""
