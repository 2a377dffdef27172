"""Readers of data files, one for each kind: they yield a row at a time with its place, in bounded memory."""
