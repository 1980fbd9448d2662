"""sglang: see README.md."""
