"""Real worker processes, real signals: whatever happens to one, the others go on."""
