"""activations: see README.md."""
