"""The Prefect runner and its local server."""
