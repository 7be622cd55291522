"""Routing that other programs recorded: read, checked, summarised, and written as a trace for the sampler `trace`."""
