"""What a user may say about scaling: when a pool is too small, and how long until it shrinks."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from cluster.autoscaling import Objectives

_USUAL = Objectives()


class ScalingArgs(BaseModel):
    """For pools whose `replicas` are a range."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ttft_s: float = Field(default=_USUAL.ttft_s, gt=0, le=3600)
    inter_token_s: float = Field(default=_USUAL.inter_token_s, gt=0, le=60)
    max_kv_use: float = Field(default=_USUAL.most_kv_use, gt=0, le=1)
    max_sequence_use: float = Field(default=_USUAL.most_sequence_use, gt=0, le=1)
    max_requests: int = Field(default=int(_USUAL.most_requests), ge=1, le=10**6)
    up_delay_s: float = Field(default=_USUAL.up_delay_s, ge=0, le=3600)
    down_delay_s: float = Field(default=_USUAL.down_delay_s, ge=0, le=86400)

    @property
    def objectives(self) -> Objectives:
        return Objectives(
            ttft_s=self.ttft_s,
            inter_token_s=self.inter_token_s,
            most_kv_use=self.max_kv_use,
            most_sequence_use=self.max_sequence_use,
            most_requests=self.max_requests,
            up_delay_s=self.up_delay_s,
            down_delay_s=self.down_delay_s,
        )
