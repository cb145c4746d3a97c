"""Models: what a checkpoint asks for, the one decoder that does it, and the way weights get in."""
