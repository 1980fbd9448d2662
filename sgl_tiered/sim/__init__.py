"""sim: see README.md."""
