"""The status page: what a fleet's state looks like as HTML, all of it inline.

Invariant: a text that came from Redis reaches the page through `escaped` only.
"""
