"""Layer-wise KV inside SGLang: see README.md."""
