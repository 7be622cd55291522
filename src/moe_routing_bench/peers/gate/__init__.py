"""The gates of QuACK, SGLang and vLLM."""
