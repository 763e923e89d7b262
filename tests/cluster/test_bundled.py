"""The command as a user starts it, with the bundled model and a real engine."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from tests.forked import forked

SMALL = ["--kernels", "reference", "--dtype", "float32", "--kv-cache-memory-bytes", "32MiB"]
PROMPT = "What does os.path.join do?"


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    words = [sys.executable, "-m", "cluster.cli", "local", "bundled", "--port", "0"]
    words += ["--served-model-name", "mine", *SMALL]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said: list[str] = []
    try:
        for line in process.stderr:
            said.append(line)
            found = re.search(r"mine is served at (http://\S+)", line)
            if found:
                yield found[1], process
                break
        else:
            pytest.fail("".join(said))
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def test_serves_the_official_client_and_ends_by_ctrl_c(
    served: tuple[str, subprocess.Popen[str]], tmp_path: Path
) -> None:
    url, process = served
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        chat: dict[str, Any] = {
            "model": "mine",
            "messages": [{"role": "user", "content": PROMPT}],
            "temperature": 0,
            "max_tokens": 24,
        }
        answer = client.chat.completions.create(**chat)
        text = answer.choices[0].message.content
        chunks = client.chat.completions.create(**chat, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
        stop = text.split()[1]
        stopped = client.chat.completions.create(**chat, stop=stop)
        assert stopped.choices[0].message.content == text[: text.index(stop)]
        assert text == asyncio.run(generated(PROMPT, tmp_path / "log"))

        address = urlsplit(url)
        with socket.create_connection((address.hostname or "", address.port or 0)) as stranger:
            stranger.sendall(b"no HTTP\r\n\r\n")
            assert stranger.recv(100).startswith(b"HTTP/1.1 400")

        # An answer is under way when Ctrl-C comes, and its client leaves.
        endless: dict[str, Any] = {"max_tokens": 1500, "extra_body": {"ignore_eos": True}}
        long = client.completions.create(model="mine", prompt="import", stream=True, **endless)
        assert next(iter(long)).object == "text_completion"
        os.kill(process.pid, signal.SIGINT)
        long.close()
    _, rest = process.communicate(timeout=30)
    assert "Invalid HTTP" not in rest, "or strangers fill a disk with it"
    assert process.returncode == 0
    assert rest.rstrip().endswith("stopped")
    assert "Traceback" not in rest


async def generated(prompt: str, log: Path) -> str:
    words = ["generate", "bundled", "--prompt", "-", "--chat", *SMALL]
    words += ["--temperature", "0", "--max-tokens", "24"]
    async with forked("cluster.cli", *words, log=log) as child:
        child.stdin.write(prompt.encode())
        child.stdin.write_eof()
        text = await child.stdout.read()
        assert await child.wait() == 0, log.read_text()
    assert re.search(r"\d+ tokens in, \d+ out in", log.read_text())
    return text.decode().removesuffix("\n")
