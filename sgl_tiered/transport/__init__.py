"""Bytes and control messages between instances: see README.md."""
