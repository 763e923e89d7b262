"""A small Llama trained on CPython's own text, so that serving needs nothing to download."""
