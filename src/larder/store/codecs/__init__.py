"""Storage codecs of keys and values: one codec per file, named after the file."""
