"""Random inputs: expert loads of a given skew, recorded routing, token rows, and where every assignment's row goes."""
