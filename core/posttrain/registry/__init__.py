"""Discovery, isolation and look-up of plugins."""
