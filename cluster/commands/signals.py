"""Signals by which users end a command."""

import signal


def ending_signals() -> tuple[signal.Signals, ...]:
    """That the terminal is gone is one, too, but under `nohup`."""
    ends = (signal.SIGINT, signal.SIGTERM)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return ends
    return (*ends, signal.SIGHUP)
