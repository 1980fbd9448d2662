"""write_admission: see README.md."""
