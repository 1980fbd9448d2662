"""metrics: see README.md."""
