"""A gRPC client of a cluster: token ids in and out."""

from __future__ import annotations

import grpc

from protos.generation_pb2 import SamplingParams
from protos.ingress_pb2 import GenerateRequest
from protos.ingress_pb2_grpc import GenerationStub
from tests.e2e.cluster import http

TIMEOUT_S = 120.0


class TokenClient:
    """Asks as the HTTP tests do: greedily, for a number of tokens. Retries nothing."""

    def __init__(self, address: str, url: str) -> None:
        self.stub = GenerationStub(grpc.insecure_channel(address, [("grpc.enable_retries", 0)]))
        self._url = url

    def request(self, prompt: str, num_tokens: int) -> GenerateRequest:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        token_ids = self._post("tokenize", {"prompt": prompt})["tokens"]
        return GenerateRequest(token_ids=token_ids, params=params)

    def tokens(self, request: GenerateRequest) -> list[int]:
        updates = self.stub.Generate(request, timeout=TIMEOUT_S)
        return [t for update in updates for delta in update.deltas for t in delta.token_ids]

    def text(self, tokens: list[int]) -> str:
        return str(self._post("detokenize", {"tokens": tokens})["prompt"])

    def _post(self, path: str, body: dict[str, object]) -> dict[str, list[int]]:
        response = http.post(f"{self._url}/{path}", json=body, timeout=TIMEOUT_S)
        assert response.status_code == 200, response.text
        answer: dict[str, list[int]] = response.json()
        return answer
