"""Triton chooses when it is imported whether its kernels are interpreted or compiled."""

import os
from pathlib import Path

if not Path("/dev/nvidia0").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
