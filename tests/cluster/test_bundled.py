"""The command as a user starts it, with the bundled model and a real engine."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import openai
import pytest

SMALL = ["--kernels", "reference", "--dtype", "float32", "--kv-cache-memory-bytes", "32MiB"]
PROMPT = "What does os.path.join do?"
COMMAND = [sys.executable, "-m", "cluster.cli"]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    words = [*COMMAND, "local", "bundled", "--port", "0", "--served-model-name", "mine", *SMALL]
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
    served: tuple[str, subprocess.Popen[str]],
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
        assert text == generated(PROMPT)

        # An answer is under way when Ctrl-C comes, and its client leaves.
        endless: dict[str, Any] = {"max_tokens": 1500, "extra_body": {"ignore_eos": True}}
        long = client.completions.create(model="mine", prompt="import", stream=True, **endless)
        assert next(iter(long)).object == "text_completion"
        os.kill(process.pid, signal.SIGINT)
        long.close()
    _, rest = process.communicate(timeout=30)
    assert process.returncode == 0
    assert rest.rstrip().endswith("stopped")
    assert "Traceback" not in rest


def generated(prompt: str) -> str:
    words = [*COMMAND, "generate", "bundled", "--prompt", "-", "--chat", *SMALL]
    words += ["--temperature", "0", "--max-tokens", "24"]
    result = subprocess.run(words, input=prompt, capture_output=True, text=True, check=True)
    assert re.search(r"\d+ tokens in, \d+ out in", result.stderr)
    return result.stdout.removesuffix("\n")
