"""Verbs of the `wanref` command, one file each or one group."""
