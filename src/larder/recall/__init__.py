"""Recall indexes over offloaded entries, one per file: the file name is the public name."""
