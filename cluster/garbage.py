"""What Python's collector looks at in a process that serves."""

import gc

# So many objects more than there were lead to a look at these. A request under way is made of some
# hundreds, which go by themselves at its end: to look after each 700, as Python does, took a tenth
# of the ingress's time.
_YOUNG = 50_000


def leave_out_what_stays() -> None:
    """Once a process is ready. What it has loaded, some hundred thousand objects, stays to its end:
    to look through all of it again, in the midst of answers, stops every thread. What comes and
    goes with requests is looked at seldom.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG)
