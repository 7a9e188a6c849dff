"""Synthetic traces of requests to a store: one workload per file, named like the file."""
