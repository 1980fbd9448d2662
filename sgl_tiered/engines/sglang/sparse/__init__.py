"""Sparse KV inside SGLang: see README.md."""
