"""Losses of models that judge answers."""
