"""Spans, metrics and logs, and their ways out."""
