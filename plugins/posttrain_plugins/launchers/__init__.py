"""Launchers: how the ranks of one training are started."""
