"""The MLflow projection of a run's record."""
