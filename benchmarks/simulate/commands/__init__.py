"""The commands: each takes the words of the command line, prints tables, returns all figures."""
