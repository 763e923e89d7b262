"""What Python's collector looks at in a process that serves."""

import gc

# Python looks through its newest objects once there are so many more than at the last look. Those
# of a request under way are some hundreds, which go at its end without that: to look whenever there
# are 700, as it does by itself, took a tenth of the ingress's time.
_YOUNG = 50_000


def leave_out_what_stays() -> None:
    """Once a process is ready. What it has loaded, some hundred thousand objects, stays to its end:
    to look through all of it again, in the midst of answers, stops every thread. What comes and
    goes with requests is looked at seldom.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG)
