"""What an operator may decide about the choice of workers."""

from dataclasses import dataclass

from router.policies import POLICIES


class RouterConfigError(ValueError):
    """Names the field, and says what would be right."""


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """`alpha`: how often a prompt's own computing counts. `max_backlog_steps`: a request waits at
    the router while the worker that it would go to has more than so many full steps of prompt
    tokens before it; None: never. Without an objective nobody is refused for being late, and
    everybody waits for `max_wait_s` at most. `overdue_s`: a tenth of the computing is for those
    who have waited longer, in order of arrival. `may_stay`: a decode worker may compute a prompt,
    where prefill workers are."""

    policy: str = "cost"
    alpha: float = 3.0
    max_backlog_steps: float | None = 1.0
    ttft_objective_s: float | None = None
    inter_token_objective_s: float | None = None
    max_waiting: int = 10_000
    max_wait_s: float = 600.0
    overdue_s: float = 10.0
    may_stay: bool = True

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise RouterConfigError(f"policy: {self.policy!r} is none of {', '.join(POLICIES)}")
        if self.max_waiting < 1:
            raise RouterConfigError(f"max_waiting: at least 1, not {self.max_waiting}")
        for name in ("alpha", "max_wait_s"):
            if not getattr(self, name) > 0:
                raise RouterConfigError(f"{name}: more than 0, not {getattr(self, name)}")
        for name in ("max_backlog_steps", "overdue_s"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise RouterConfigError(f"{name}: at least 0, not {value}")
        for name in ("ttft_objective_s", "inter_token_objective_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise RouterConfigError(f"{name}: more than 0, not {value}")
