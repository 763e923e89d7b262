"""What routers, workers and an engine's own watchdog judge a worker by, alike: where they differed,
one would send away what the other has sent."""

# One whose last word is older may be stopped, cut off or stuck: four load reports did not come.
SILENT_AFTER_S = 2.0
# Of the sequences that run, while a prompt is computed beside them.
LONG_PAUSE_S = 0.25


def overdue_s(step_s: float) -> float:
    """How long a step may last that should take `step_s`: a large model on a small machine is at
    one chunk of a prompt for minutes, and not stuck."""
    return 3.0 * step_s + 1.0
