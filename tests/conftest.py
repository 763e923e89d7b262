"""What must be decided before a library is loaded."""

import os
import signal
from pathlib import Path

# Triton chooses when it is imported whether its kernels are interpreted or compiled.
if not Path("/dev/nvidia0").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# Several test processes share the cores: OpenMP threads that spin while they wait make the suite
# three times as slow.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# What a shell runs in the background ignores Ctrl-C, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
