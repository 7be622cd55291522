"""The request: the axes of the grid, config files, model presets, and their expansion to jobs."""
