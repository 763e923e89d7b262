"""The one thing that we want of Serve's routing: to be told which replicas there are.

Requests do not travel through Serve's handles; a handle is made only so that this is called.
"""

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class ReplicaWatch(RequestRouter):
    """Passes the replicas of one deployment on to this process's `MEMBERSHIP`."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        # Serve copies this class by value; what it is to reach must be imported there.
        from cluster.membership import MEMBERSHIP

        super().update_replicas(replicas)
        known = {one.replica_id.unique_id: one.replica_metadata for one in replicas}
        MEMBERSHIP.publish(self._deployment_id.name, known)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """For whoever calls through the handle after all (Serve's own health checks do not)."""
        return [candidate_replicas]
