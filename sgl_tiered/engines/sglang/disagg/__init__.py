"""Prefill and decode as two servers, their KV moved by us: see README.md."""
