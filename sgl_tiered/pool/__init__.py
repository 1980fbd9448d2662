"""pool: see README.md."""
