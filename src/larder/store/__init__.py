"""Persistent store of sessions and shared prefixes; everything is verified when it is read."""
