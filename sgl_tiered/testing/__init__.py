"""testing: see README.md."""
