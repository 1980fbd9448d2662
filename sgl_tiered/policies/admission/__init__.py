"""admission: see ../README.md."""
