"""Seeded generators of synthetic rows."""
