"""Text embedders for segments and questions. The file name is the public name."""
