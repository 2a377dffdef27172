"""Losses over pairs beside a gold answer."""
