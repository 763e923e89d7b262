"""Bodies of whatever JSON can say: each is answered, or refused in OpenAI's shape."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.openai.chat_request import ChatRequest
from cluster.openai.completion_request import CompletionRequest
from cluster.openai.responses.request import ResponsesRequest
from cluster.openai.token_requests import DetokenizeRequest, TokenizeRequest
from tests.cluster.conftest import check_left, lasting
from tests.cluster.test_bad_input import CHAT, COMPLETIONS, RESPONSES, error_of

# Values of every kind that JSON has, small ones and absurd ones.
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 50),
    st.integers(),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=12),
    st.sampled_from(["user", "assistant", "auto", "text", "x" * 3000]),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.one_of(st.sampled_from(["role", "content", "type", "text", "1"]), st.text()),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=12,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "bad"])},
        optional={"content": st.one_of(st.text(max_size=20), values), "tool_calls": values},
    ),
    max_size=3,
)
items = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.sampled_from(
                ["message", "function_call", "function_call_output", "reasoning"]
            )
        },
        optional={
            "role": st.sampled_from(["user", "assistant", "bad"]),
            "content": st.one_of(st.text(max_size=20), values),
            "call_id": st.text(max_size=3),
            "name": st.text(max_size=3),
            "arguments": values,
            "output": values,
            "summary": values,
        },
    ),
    max_size=3,
)
FIELDS: dict[str, tuple[list[str], dict[str, st.SearchStrategy[Any]]]] = {
    COMPLETIONS: ([*CompletionRequest.model_fields, "suffix", "best_of"], {"prompt": st.text()}),
    CHAT: ([*ChatRequest.model_fields, "echo", "functions"], {"messages": messages}),
    RESPONSES: ([*ResponsesRequest.model_fields, "store"], {"input": st.one_of(st.text(), items)}),
    "/tokenize": ([*TokenizeRequest.model_fields], {"prompt": st.text()}),
    "/detokenize": ([*DetokenizeRequest.model_fields], {"tokens": values}),
}


@pytest.mark.parametrize("path", FIELDS)
@settings(max_examples=100)
@given(data=st.data())
def test_random_bodies_never_break_the_server(path: str, data: st.DataObject) -> None:
    names, usual = FIELDS[path]
    names = [name for name in names if name != "model"]
    body = data.draw(
        st.one_of(
            st.dictionaries(st.sampled_from(names), values, max_size=4),
            st.fixed_dictionaries(usual),
            values,
        )
    )
    if isinstance(body, dict) and data.draw(st.booleans()):
        body = {**{name: data.draw(kind) for name, kind in usual.items()}, **body}

    async def send() -> None:
        server = lasting()
        response = await server.client.post(path, content=json.dumps(body).encode())
        assert response.status_code in (200, 400, 413, 422), response.text
        if response.status_code == 200:
            assert response.text
        else:
            error_of(response)
        check_left(server)

    asyncio.run(send())
