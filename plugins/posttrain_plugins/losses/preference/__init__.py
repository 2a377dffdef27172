"""Losses over pairs of a better and a worse answer."""
