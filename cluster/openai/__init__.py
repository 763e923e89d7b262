"""OpenAI's HTTP API in values: what clients may ask, and how answers and errors are worded."""
