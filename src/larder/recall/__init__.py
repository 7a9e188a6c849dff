"""Indexes that find parked entries again, one per file: the file name is the public name."""
