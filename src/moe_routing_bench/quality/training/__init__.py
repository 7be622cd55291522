"""Training a run, adapting a trained one, and timing their steps."""
