"""Servers in a pool: see README.md."""
