"""The experts' products of other packages."""
