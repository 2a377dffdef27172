"""Generation, evaluation and the gate."""
