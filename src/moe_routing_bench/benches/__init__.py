"""Operations under test: one folder per operation, with its table of implementations and the definition of what is right.

Importing this package imports no bench, so that a measurement depends on its own bench and on no list of all
(`registry`).
"""
