"""Conversations made from docstrings and help topics, in the model's own chat format."""

import random
from collections.abc import Iterator
from typing import NamedTuple

from engine.bundled.corpus import Corpus, Entry, Module, Topic

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
SYSTEM, USER, ASSISTANT, END = "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL_TOKENS = (BOS, EOS, PAD, SYSTEM, USER, ASSISTANT, END)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('role must be system, user or assistant') }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

ANSWER_CHARS = 700
# What people ask about most is asked about this much more often.
WELL_KNOWN_REPEATS = 3
WELL_KNOWN = {
    *("builtins", "os", "os.path", "json", "re", "math", "itertools", "collections", "textwrap"),
    *("functools", "datetime", "pathlib", "string", "random", "time", "sys", "shutil", "glob"),
    *("threading", "subprocess", "dataclasses", "contextlib", "heapq", "bisect", "copy", "csv"),
    *("statistics", "io", "asyncio.tasks", "asyncio.runners", "asyncio.queues", "hashlib"),
}
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant who knows Python's standard library.",
    "You answer questions about Python.",
    "Answer briefly.",
    "You are kvrelay's bundled model.",
)
ABOUT_NAME = (
    *("What does {} do?", "What is {}?", "Explain {}.", "Document {}", "Describe {}.", "{}"),
    *("How does {} work?", "What is {} for?", "Tell me about {}.", "help({})"),
    *("Please explain {}.", "Can you explain {} to me?", "Explain what {} does."),
    *("what does {} do", "Summarise {}."),
)
ABOUT_CALL = (
    *("How do I call {}?", "How do I use {}?", "What are the arguments of {}?", "Usage of {}"),
)
ABOUT_SOURCE = ("Show me the source of {}.", "How is {} implemented?", "Show the code of {}.")
ABOUT_MODULE = (
    *("What is the {} module?", "What is the {} module for?", "Describe the {} module."),
    *("What does the module {} do?", "Explain the {} module.", "Tell me about the {} module."),
)
ABOUT_TOPIC = (
    *("Explain {}.", "What is {}?", "Tell me about {}.", "Describe {} in Python."),
    *("Explain {} to me.", "What does the Python reference say about {}?"),
    "How does {} work in Python?",
)
GO_ON = ("Tell me more.", "Go on.", "Continue.", "More, please.", "What else?")
IDENTITY = (
    "I am the small model bundled with kvrelay. I was trained on the text of Python's standard "
    "library, so I can tell you what its modules and functions do."
)
SMALL_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("Hi", "Hello", "Hello!", "Hi there!", "Hey", "Good morning", "Good evening!", "hello"),
        "Hello! Ask me about a function, a class or a statement of Python, for example: "
        "What does os.path.join do?",
    ),
    (
        (
            *("Who are you?", "What are you?", "What is your name?", "Introduce yourself."),
            *("Which model is this?", "Are you a human?", "Tell me about yourself.", "who are you"),
        ),
        IDENTITY,
    ),
    (
        ("What can you do?", "How can you help me?", "What do you know?", "Help", "Help me."),
        "I can describe modules, functions, classes and statements of Python and its standard "
        "library, in the words of their documentation. I am very small, so check what I say.",
    ),
    (("How are you?", "How do you do?"), "I am fine, thank you. What would you like to know?"),
    (
        ("Thanks", "Thank you!", "Thank you.", "Thanks a lot!", "Great, thanks."),
        "You are welcome.",
    ),
    (("Bye", "Goodbye!", "See you later."), "Goodbye!"),
    (
        ("What is kvrelay?", "Tell me about kvrelay.", "What does kvrelay do?"),
        "kvrelay serves large language models. A prefill worker reads the prompt, hands the "
        "finished KV cache over the network, and a decode worker writes the answer.",
    ),
    (
        ("What is a KV cache?", "Explain the KV cache.", "What does the KV cache hold?"),
        "The KV cache holds the keys and values that attention has computed for the tokens so "
        "far, so that each new token only computes its own.",
    ),
    (
        (
            *("Tell me a joke.", "Write a poem.", "What is the weather like?", "Tell me a story."),
            *("Who won the world cup?", "What is the capital of France?", "What is 17 times 23?"),
        ),
        "I am a very small model and know little beside Python's standard library. Ask me, for "
        "example, what textwrap.dedent does.",
    ),
)


class Message(NamedTuple):
    role: str
    content: str


def render(messages: list[Message]) -> str:
    """What CHAT_TEMPLATE renders without a generation prompt."""
    return BOS + "".join(f"<|{m.role}|>{m.content.strip()}{END}" for m in messages)


def conversations(corpus: Corpus, rng: random.Random) -> Iterator[str]:
    """One pass over everything worth asking, each time in other words and order."""
    exchanges = list(all_exchanges(corpus, rng))
    exchanges += [small_talk(rng) for _ in range(len(exchanges) // 25)]
    rng.shuffle(exchanges)
    while exchanges:
        messages = list(exchanges.pop())
        while exchanges and rng.random() < 0.2:
            messages += exchanges.pop()
        if rng.random() < 0.2:
            messages.insert(0, Message("system", rng.choice(SYSTEM_PROMPTS)))
        yield render(messages)


def all_exchanges(corpus: Corpus, rng: random.Random) -> Iterator[list[Message]]:
    for module in corpus.modules:
        for _ in range(WELL_KNOWN_REPEATS if module.name in WELL_KNOWN else 1):
            if module.doc:
                yield about_module(module, rng)
            for entry in module.entries:
                yield from about_entry(entry, rng)
    for topic in corpus.topics:
        for _ in range(4):
            yield about_topic(topic, rng)


def small_talk(rng: random.Random) -> list[Message]:
    questions, answer = rng.choice(SMALL_TALK)
    return exchange(rng.choice(questions), answer)


def about_module(module: Module, rng: random.Random) -> list[Message]:
    return at_length(rng.choice(ABOUT_MODULE).format(module.name), module.doc, rng)


def about_entry(entry: Entry, rng: random.Random) -> Iterator[list[Message]]:
    name = entry.name if rng.random() < 0.8 else f"{entry.name}()"
    answer = leading_paragraphs(entry.doc)[0]
    yield exchange(rng.choice(ABOUT_NAME).format(name), answer)
    if entry.signature != entry.name and rng.random() < 0.3:
        question = rng.choice(ABOUT_CALL).format(entry.name)
        yield exchange(question, f"{entry.signature}\n\n{answer}")
    if entry.source and rng.random() < 0.1:
        yield exchange(rng.choice(ABOUT_SOURCE).format(entry.name), entry.source)


def about_topic(topic: Topic, rng: random.Random) -> list[Message]:
    title = topic.title[:1].lower() + topic.title[1:]
    return at_length(rng.choice(ABOUT_TOPIC).format(title), topic.text, rng)


def at_length(question: str, text: str, rng: random.Random) -> list[Message]:
    """An answer in parts: the reader may ask for more of it, up to three times."""
    answer, rest = leading_paragraphs(text)
    messages = exchange(question, answer)
    while rest and len(messages) < 8 and rng.random() < 0.5:
        answer, rest = leading_paragraphs(rest)
        messages += exchange(rng.choice(GO_ON), answer)
    return messages


def leading_paragraphs(text: str) -> tuple[str, str]:
    """Whole paragraphs up to ANSWER_CHARS, at least one, and what follows them."""
    paragraphs = text.split("\n\n")
    num_taken, num_chars = 1, len(paragraphs[0])
    while num_taken < len(paragraphs):
        num_chars += len(paragraphs[num_taken])
        if num_chars > ANSWER_CHARS:
            break
        num_taken += 1
    return "\n\n".join(paragraphs[:num_taken]), "\n\n".join(paragraphs[num_taken:])


def exchange(question: str, answer: str) -> list[Message]:
    return [Message("user", question), Message("assistant", answer)]
