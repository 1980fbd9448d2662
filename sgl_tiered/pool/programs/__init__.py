"""Programs on the pool's calls (MemServe, Table 3): see README.md."""
