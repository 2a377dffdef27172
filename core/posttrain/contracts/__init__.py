"""The contracts: one file per extension point."""
