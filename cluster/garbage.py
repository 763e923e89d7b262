"""What Python's collector looks at in a process that serves."""

import gc


def leave_out_what_stays() -> None:
    """Once a process is ready. What it has loaded, some hundred thousand objects, stays to its end:
    to look through all of it again, in the midst of answers, stops every thread.
    """
    gc.collect()
    gc.freeze()
