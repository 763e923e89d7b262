"""The prefill leg: prompts computed in chunks and handed over block by block."""
