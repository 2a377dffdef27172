"""The training loop that serves every trainer."""
