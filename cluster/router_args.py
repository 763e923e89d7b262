"""What a user may say about the choice of workers."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, field_validator

from cluster.validation import one_of
from router.config import RouterConfig
from router.policies import POLICIES

_USUAL = RouterConfig()


class RouterArgs(BaseModel):
    """Without `ttft_objective_s` nobody is refused because the first token would be late."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: str = _USUAL.policy
    alpha: float = Field(default=_USUAL.alpha, gt=0, le=100)
    max_backlog_steps: float | None = Field(default=_USUAL.max_backlog_steps, ge=0, le=10**6)
    ttft_objective_s: float | None = Field(default=None, gt=0, le=86400)
    inter_token_objective_s: float | None = Field(default=None, gt=0, le=60)
    max_waiting: int = Field(default=_USUAL.max_waiting, ge=1, le=10**6)
    max_wait_s: float = Field(default=_USUAL.max_wait_s, gt=0, le=86400)
    overdue_s: float = Field(default=_USUAL.overdue_s, ge=0, le=86400)

    @field_validator("policy")
    @classmethod
    def _check_policy(cls, policy: str) -> str:
        return one_of(policy, POLICIES)

    def config(self, may_stay: bool) -> RouterConfig:
        return RouterConfig(**self.model_dump(), may_stay=may_stay)
