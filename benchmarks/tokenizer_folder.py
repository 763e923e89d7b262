"""A tokenizer of one word a token, so that a model of random weights can be served over HTTP."""

import json
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Token i is the word `wi`."""
    if (folder / "tokenizer.json").exists():
        return
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
