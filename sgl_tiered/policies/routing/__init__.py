"""routing: see README.md."""
