"""The built-in plugins: everything that touches torch, tokenizers and data."""
