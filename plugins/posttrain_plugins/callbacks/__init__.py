"""What joins a training beside its loss. One a file; light, torch inside of functions."""
