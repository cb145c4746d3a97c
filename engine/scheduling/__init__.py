"""Which tokens are computed in a step, and in which KV blocks. Pure Python: no torch here."""
