"""For authors of plugins: batches made by hand, worked examples and conformance suites."""
