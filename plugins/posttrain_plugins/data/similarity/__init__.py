"""What rows have in common: shingles, near duplicates, overlap with evaluation rows."""
