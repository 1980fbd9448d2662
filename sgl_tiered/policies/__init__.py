"""policies: see README.md."""
