"""Pages kept as activations inside SGLang: see README.md."""
