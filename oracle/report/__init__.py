"""How verdicts are shown."""
