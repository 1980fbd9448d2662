"""Spec to records to report: see README.md."""
