"""training: see README.md."""
