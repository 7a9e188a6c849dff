"""Saved caches: verified when they come back, or not given back at all."""
