"""Who leaves a full tier first: one published rule per file, whose name is the public name."""
