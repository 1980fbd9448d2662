"""Layer-wise KV, as a rank sees it: see README.md."""
