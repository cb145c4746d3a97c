"""A fleet in one command, and the model it runs."""
