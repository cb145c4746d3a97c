"""What this machine does, in figures."""
