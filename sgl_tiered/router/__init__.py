"""router: see README.md."""
