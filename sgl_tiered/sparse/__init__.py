"""KV of which layers lack some tokens: see README.md."""
