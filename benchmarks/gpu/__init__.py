"""What the GPU path computes and how fast, measured by one command: `run.sh`."""
