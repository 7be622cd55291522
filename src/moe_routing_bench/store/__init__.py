"""Storage: rows and their schema, where files lie, platforms."""
