"""Hand-off rules: one class for each failure, one file for each subject, all light."""
