"""Text to token ids and back: needs neither torch nor transformers."""
