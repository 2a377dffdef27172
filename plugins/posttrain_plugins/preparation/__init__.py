"""From the rows of a dataset to examples: encoding, truncation, and an account of what is left out."""
