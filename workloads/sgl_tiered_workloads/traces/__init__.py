"""Readers of public traces and data sets; paths are the user's."""
