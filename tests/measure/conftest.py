"""Implementations of the tests among those of `pack`."""

from packs import add_packs, no_ceilings

__all__ = ["add_packs", "no_ceilings"]
