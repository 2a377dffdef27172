"""The verbs under `posttrain data`: each is imported when it is called."""
