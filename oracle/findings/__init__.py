"""What was found in other people's libraries: scripts that show it without wanref, each at most 30 lines.

A script says in its first line what is wrong, in a comment whom it is about, and exits with 1 if it shows it, with 0
if it is mended. Each is meant to be pasted into an issue.
"""
