"""tiers: see README.md."""
