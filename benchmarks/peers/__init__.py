"""The engines under measure, each behind the same few lines and in a process of its own."""
