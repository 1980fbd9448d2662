"""cost: see README.md."""
