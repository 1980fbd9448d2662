"""layers: see ../README.md."""
