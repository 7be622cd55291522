"""Grouped GEMMs for Hopper (sm_90a): warp-specialised, persistent, with TMA and warpgroup MMA (wgmma)."""

ARCH = "sm_90a"
