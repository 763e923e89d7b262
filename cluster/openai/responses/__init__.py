"""OpenAI's Responses API: a chat in other words, of which nothing is kept."""
