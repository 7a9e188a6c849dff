"""Storage parts: form and precision of kept entries, one published method per file."""
