"""Runs a plan: inputs, forward pass, sampled tokens. Knows tensors; decides nothing."""
