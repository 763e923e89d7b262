"""A process that compiles grammars to see whether it can be done, see trial.py.

The first line in is the vocabulary, each further one a grammar and how long it may take; a line out
for each, unless it takes longer: then a signal ends the process.
"""

import json
import os
import resource
import signal
import sys

from engine.errors import RequestError
from engine.grammar.compiler import deep_thread
from engine.grammar.library import Vocabulary
from engine.grammar.value import Grammar, GrammarKind

MAX_MEMORY_BYTES = 4 << 30  # of addresses, of which a deep stack and the library's take some


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    thread = deep_thread("grammars")
    tokenizer, vocab_size, eos = json.loads(sys.stdin.readline())
    vocabulary = Vocabulary(tokenizer, vocab_size, tuple(eos))
    for line in sys.stdin:
        kind, text, compile_s = json.loads(line)
        thread.submit(_answer, vocabulary, Grammar(GrammarKind(kind), text), compile_s)
    os._exit(0)  # the parent is gone, whatever is being compiled


def _answer(vocabulary: Vocabulary, grammar: Grammar, compile_s: float) -> None:
    problem = None
    signal.setitimer(signal.ITIMER_PROF, compile_s)  # of all threads
    try:
        vocabulary.compile(grammar)
    except RequestError as error:
        problem = error.message
    except BaseException as error:  # noqa: BLE001 - a panic of the library's is no Exception
        problem = f"the compiler failed: {error!r}"
    signal.setitimer(signal.ITIMER_PROF, 0)
    os.write(1, json.dumps(problem).encode() + b"\n")
