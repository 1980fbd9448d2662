"""prefetch: see README.md."""
