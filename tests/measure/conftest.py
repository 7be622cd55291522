"""Implementations of the tests among those of `pack`."""

from packs import add_packs

__all__ = ["add_packs"]
