"""sparsity: see README.md."""
