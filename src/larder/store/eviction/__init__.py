"""Eviction policies of a full tier: one published rule per file, whose name is the public name."""
