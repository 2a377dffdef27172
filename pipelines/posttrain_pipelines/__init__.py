"""What Prefect and MLflow add to posttrain: a runner, a tracker, promotion and the services behind them."""
