"""vLLM's permutation with its copy of rows."""
