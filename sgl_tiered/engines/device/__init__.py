"""The device as the tiers see it: see README.md."""
