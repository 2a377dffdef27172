"""Chat templates: rendering, tokenization of conversations, assistant spans."""
