"""Moving blobs between the pools of two workers."""
