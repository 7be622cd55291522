"""Layers of other packages that autograd differentiates."""
