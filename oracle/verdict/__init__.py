"""What is claimed about a run."""
