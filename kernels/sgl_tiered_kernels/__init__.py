"""sgl_tiered_kernels: see README.md."""
