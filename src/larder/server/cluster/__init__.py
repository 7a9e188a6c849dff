"""Serving by several replica processes, on one machine or on a cluster."""
