"""combine of vLLM and SGLang."""
