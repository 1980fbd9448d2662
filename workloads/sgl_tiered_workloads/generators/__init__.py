"""Workloads of the papers and of traces, one a file, each a function of a seed."""
