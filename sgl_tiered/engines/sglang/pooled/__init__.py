"""Servers in a pool: what they lend to each other, and the tier ``peer``."""
