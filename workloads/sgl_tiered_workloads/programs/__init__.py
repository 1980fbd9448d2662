"""SGLang frontend programs over shared prefixes: see README.md.

``python -m sgl_tiered_workloads.programs few-shot --url http://127.0.0.1:30000``
"""
