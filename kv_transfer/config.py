"""What an operator may say about a worker's exchange with its peers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ExchangeConfig:
    max_leases: int = 1024  # hand-offs that a holder serves at once
    max_quarantined_share: float = 0.25  # of all blocks, before the worker is unhealthy
    stuck_after_s: float = 5.0  # a holder whose engine does not turn for so long is left
    # a prompt that nobody else may compute waits so long for a prefill worker that is not there
    unreachable_patience_s: float = 5.0
    slow_bytes_per_s: float = 0.0  # a link below this is loudly reported
    checksums: bool = False  # of every block that is handed out; the puller compares
