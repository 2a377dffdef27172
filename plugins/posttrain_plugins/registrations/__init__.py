"""What the built-in plugins are: their registrations, by group."""
