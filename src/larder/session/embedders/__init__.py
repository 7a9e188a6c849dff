"""Embedders: what turns segments and questions into vectors. The file name is the public name."""
