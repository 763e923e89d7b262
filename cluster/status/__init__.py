"""What `kvrelay status` shows."""
