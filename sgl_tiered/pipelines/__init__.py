"""pipelines: see README.md."""
