"""What is kept: rows and their schema, where files lie, platforms."""
