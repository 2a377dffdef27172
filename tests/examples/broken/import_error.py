"""A plugin that needs a library that is not installed."""

import acme_numerics_that_nobody_has  # noqa: F401

POSTTRAIN_API = ">=1,<2"
