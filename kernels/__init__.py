"""The arithmetic of a forward pass: one file an operation, its torch reference inside."""
