"""engines: see README.md."""
