"""The permutations of vLLM and SGLang."""
