"""KV bound layer by layer: see README.md."""
