"""From a plan to committed artifacts."""
