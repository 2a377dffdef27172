"""Images of rows: taken in, kept as files, placed among the parts of messages."""
