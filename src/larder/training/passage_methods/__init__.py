"""Family of methods that are trained through the whole model, one per file."""
