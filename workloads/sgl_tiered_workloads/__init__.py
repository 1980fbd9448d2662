"""sgl_tiered_workloads: see README.md."""
