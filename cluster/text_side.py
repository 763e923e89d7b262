"""What of a model needs no weights: how its text is read and written."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.cluster_args import ClusterArgs
from cluster.front_args import FrontArgs
from cluster.served_model import ServedModel
from cluster.validation import in_place
from engine.config import EngineConfig
from engine.errors import ConfigError, ModelError
from engine.generation_defaults import GenerationDefaults, read_generation_defaults
from engine.model_source import ModelSource, resolve_model
from engine.text.chat_template import ChatTemplate
from engine.text.special_tokens import SpecialTokens
from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextSide:
    source: ModelSource
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    defaults: GenerationDefaults
    names: tuple[str, ...]

    def model(self, max_model_len: int, vocab_size: int) -> ServedModel:
        return ServedModel(
            names=self.names,
            root=self.source.name,
            tokenizer=self.tokenizer,
            chat_template=self.chat_template,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            defaults=self.defaults,
        )


def load_text_side(
    config: EngineConfig, names: Sequence[str], chat_template: str | None, *, weights: bool
) -> TextSide:
    """`names` are what the model is served as, `chat_template` is a file; by default its own. With
    `weights`, a model without them is refused, or they are downloaded."""
    source = resolve_model(config.model, config.revision, config.download_dir, weights=weights)
    tokenizer = Tokenizer.from_folder(source.folder)
    special = tokenizer.special_tokens
    if chat_template is None:
        template = ChatTemplate.from_folder(source.folder, special)
    else:
        template = _from_file(Path(chat_template), special)
    defaults = read_generation_defaults(source.folder)
    return TextSide(source, tokenizer, template, defaults, tuple(names) or (source.name,))


def cluster_text_side(args: ClusterArgs, *, weights: bool) -> TextSide:
    with in_place("front", FrontArgs.model_fields):
        return load_text_side(
            args.engine_config, args.served_model_name, args.front.chat_template, weights=weights
        )


def _from_file(path: Path, special: SpecialTokens) -> ChatTemplate:
    """Of the user's, not of the model's."""
    try:
        return ChatTemplate.from_file(path, special)
    except ModelError as error:
        raise ConfigError("chat_template", str(error)) from error
