"""length: see README.md."""
