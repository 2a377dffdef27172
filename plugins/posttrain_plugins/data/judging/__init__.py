"""What is wrong with rows: cleaning while they are loaded, and an account of everything that is odd."""
