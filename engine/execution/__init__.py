"""Runs a plan: inputs, forward pass, sampled tokens. Knows tensors; decides nothing.

Importing it chooses how torch's threads wait for each other, unless torch is loaded already or the
user chose: a short spin, then sleep. GNU OpenMP spins without end by default, so two engines on the
same cores, or one beside any other busy process, would spend their time slices waiting for a thread
that cannot run.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "2000")
