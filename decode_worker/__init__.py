"""The decode leg: sessions, prompts fetched or computed, answers token by token."""
