"""One conversation with a server, turn by turn, each request recorded however it ends."""

import asyncio
from collections.abc import Callable

from cluster.bench.answer import Failure, FailureKind, Reception, Tally
from cluster.bench.client import Asking, Client
from cluster.bench.connection import Clock
from cluster.bench.prompts import Prompts, Said
from cluster.bench.record import Record
from cluster.bench.workload import Conversation

# A proxy before a server that has gone accepts connections, and closes them.
_NOT_THERE = (FailureKind.NOT_CONNECTED, FailureKind.BROKEN)


class Talk:
    """Asks; owns neither the client nor the records."""

    def __init__(
        self,
        client: Client,
        asking: Asking,
        prompts: Prompts,
        clock: Clock,
        keep: Callable[[Record], None],
        *,
        tally: Tally,
        think_s: float = 0.0,
    ) -> None:
        self._client = client
        self._asking = asking
        self._prompts = prompts
        self._clock = clock
        self._keep = keep
        self._tally = tally
        self._think_s = think_s
        self.num_unsent = 0  # turns that nobody could ask, since one before them had failed

    async def converse(self, conversation: Conversation, due_s: float | None, end_s: float) -> bool:
        """False if the server was not there."""
        answers: list[Said] = []
        turns = conversation.turns
        for turn in range(len(turns)):
            if turn:
                if self._clock() + self._think_s >= end_s:
                    break  # it would not be sent, so nobody waits for its time
                await asyncio.sleep(self._think_s)
            reception = Reception(self._tally)
            at_s = due_s if turn == 0 else None
            said = await self._ask(conversation, turn, answers, at_s, reception)
            if isinstance(said, Failure):
                self.num_unsent += len(turns) - turn - 1
                is_heard = turn > 0 or reception.any
                return is_heard or said.kind not in _NOT_THERE
            answers.append(said)
        return True

    async def _ask(
        self,
        conversation: Conversation,
        turn: int,
        answers: list[Said],
        due_s: float | None,
        reception: Reception,
    ) -> Said | Failure:
        turns = conversation.turns[: turn + 1]
        num_output = turns[-1].num_output
        body = self._asking.body(self._prompts.members(turns, answers), num_output)
        if due_s is not None:
            await asyncio.sleep(due_s - self._clock())
        failure: Failure | None = Failure(FailureKind.INTERRUPTED, "before its end")
        self._tally.num_sent += 1
        sent_s = self._clock()
        try:
            failure = await self._client.ask(self._asking.endpoint.path, body, reception)
            said = reception.said()
            if failure is None and self._asking.return_token_ids and not said.token_ids:
                failure = Failure(FailureKind.NO_TOKEN_IDS, "ask for text prompts instead")
        finally:
            self._tally.num_ended += 1
            self._tally.num_failed += failure is not None
            self._keep(
                Record(
                    conversation.number,
                    turn,
                    num_output,
                    due_s,
                    sent_s,
                    reception.first_s,
                    reception.last_s,
                    self._clock(),
                    reception.gaps_s,
                    reception.usage,
                    failure,
                )
            )
        return failure or said
