"""Looking at data: what becomes of rows, as a person can see it in a terminal or on a page. Light."""
