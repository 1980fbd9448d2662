"""Prefill and decode as two servers: see README.md."""
