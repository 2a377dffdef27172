"""Datasets: sources, splits, rows on disk and the stages that make them."""
