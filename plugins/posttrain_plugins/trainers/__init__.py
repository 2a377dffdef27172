"""Trainers: which rows, which sequences, which losses. One a file."""
