"""eviction: see README.md."""
