"""Datasets of tokens: made, kept in Arrow files, packed."""
