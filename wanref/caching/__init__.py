"""Caches: what wraps a stage's `BlockStack`, and nothing else."""
