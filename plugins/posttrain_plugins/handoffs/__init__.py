"""Hand-off rules: one file each, all light."""
