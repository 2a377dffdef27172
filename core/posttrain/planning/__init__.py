"""From a pipeline file to a plan."""
