"""One cluster on one load under one policy: what every comparison is made of."""

from dataclasses import dataclass, replace

from benchmarks.simulate.cluster import ClusterPlan
from benchmarks.simulate.device import Device
from benchmarks.simulate.figures import Figures, Objective, figures_of
from benchmarks.simulate.front import Choosing
from benchmarks.simulate.plain import PLAIN_POLICIES, PlainRouter
from benchmarks.simulate.simulation import Apply, MakeRouter, Run, our_router, simulate
from benchmarks.simulate.traffic import Request
from engine.errors import ConfigError


@dataclass(frozen=True)
class Bench:
    """The machine and the measure; the rest differs from run to run."""

    device: Device
    objective: Objective

    def run(
        self, plan: ClusterPlan, requests: list[Request], policy: str | None = None
    ) -> tuple[Run, Figures]:
        """Under the plan's own policy, or the one that is named."""
        if policy in PLAIN_POLICIES:
            run = simulate(plan, self.device, requests, _plain(policy))
        else:
            named = plan if policy is None else under(plan, policy)
            run = simulate(named, self.device, requests, our_router)
        return run, figures_of(run, self.objective)


def under(plan: ClusterPlan, policy: str) -> ClusterPlan:
    """Policies that choose but once send at once: waiting at the router gains them nothing."""
    backlog = plan.router.max_backlog_steps if policy == "cost" else None
    router = replace(plan.router, policy=policy, max_backlog_steps=backlog)
    return replace(plan, router=router)


def _plain(policy: str) -> MakeRouter:
    def make(plan: ClusterPlan, device: Device, seed: int) -> tuple[Choosing, Apply]:
        if not plan.num_prefill:
            raise ConfigError("policy", f"{policy} needs prefill workers")
        router = PlainRouter(policy, plan.router.alpha, device, seed)
        return router, router.apply

    return make
