"""What a routing rule costs in quality: a tiny language model, its training runs, and their comparison."""
