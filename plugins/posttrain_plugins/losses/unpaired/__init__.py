"""Losses over answers that are good or bad."""
