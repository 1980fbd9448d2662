"""sgl_tiered: see README.md."""
