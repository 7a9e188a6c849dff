"""How keys and values are spelled when they are saved: one way per file, named by the file."""
