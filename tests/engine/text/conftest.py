import functools

import pytest

from engine.text.tokenizer import Tokenizer
from tests.engine.text import small_tokenizers


@functools.cache
def make(kind: str) -> Tokenizer:
    return small_tokenizers.wrapped(small_tokenizers.KINDS[kind]())


@pytest.fixture(params=small_tokenizers.KINDS, scope="session")
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return make(request.param)


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return make("byte_level")


@pytest.fixture(scope="session")
def llama_2() -> Tokenizer:
    return make("llama_2")
