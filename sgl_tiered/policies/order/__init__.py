"""order: see README.md."""
