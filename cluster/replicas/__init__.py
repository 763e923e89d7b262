"""What runs in each Ray Serve replica."""
