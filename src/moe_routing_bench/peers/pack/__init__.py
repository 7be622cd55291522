"""Copies of rows of vLLM and SGLang."""
