"""The tokens with a part to play, by the names that templates and configs call them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ModelError
from engine.models.json_config import read_json_object

NAMES = (
    *("bos_token", "eos_token", "unk_token", "sep_token"),
    *("pad_token", "cls_token", "mask_token"),
)


@dataclass(frozen=True, slots=True)
class AddedToken:
    """An entry of `added_tokens_decoder`: a token outside the trained vocabulary."""

    token_id: int
    content: str
    special: bool
    options: Mapping[str, bool]  # lstrip, rstrip, normalized, single_word


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """`named` has the template's variables (bos_token, eos_token, ...) that the model sets."""

    named: Mapping[str, str]
    extra: tuple[str, ...]
    added: tuple[AddedToken, ...]

    @property
    def contents(self) -> tuple[str, ...]:
        return (*self.named.values(), *self.extra)


def read_special_tokens(folder: Path, config: Mapping[str, Any]) -> SpecialTokens:
    """From tokenizer_config.json, and special_tokens_map.json for what that leaves out."""
    map_path, config_path = folder / "special_tokens_map.json", folder / "tokenizer_config.json"
    fallback = read_json_object(map_path) if map_path.is_file() else {}
    named: dict[str, str] = {}
    for name in NAMES:
        path, source = (config_path, config) if name in config else (map_path, fallback)
        content = _content(path, name, source.get(name))
        if content is not None:
            named[name] = content
    extra: list[str] = []
    for path, source in ((map_path, fallback), (config_path, config)):
        for own_name, token in _extra_tokens(path, source):
            extra.append(token)
            if own_name is not None:
                named[own_name] = token
    return SpecialTokens(named, tuple(dict.fromkeys(extra)), tuple(_added_tokens(folder, config)))


def _content(path: Path, name: str, token: Any) -> str | None:
    """Tokens stand as plain strings or as objects with their options; null is none."""
    content = token.get("content") if isinstance(token, Mapping) else token
    if token is None:
        return None
    if isinstance(content, str):
        return _whole(path, name, content)
    told = "an object without one" if isinstance(token, Mapping) else type(token).__name__
    raise ModelError(f"{path}: {name}: a token must be a text or an object with content, is {told}")


def _whole(path: Path, name: str, content: str) -> str:
    try:
        content.encode()
    except UnicodeEncodeError:
        raise ModelError(f"{path}: {name}: a token must be a text of whole characters") from None
    return content


def _extra_tokens(path: Path, source: Mapping[str, Any]) -> Iterator[tuple[str | None, str]]:
    """Unnamed ones (a list) and those with a name of the model's own (an object)."""
    for key in ("additional_special_tokens", "extra_special_tokens"):
        tokens = source.get(key)
        if isinstance(tokens, Mapping):
            pairs = [
                (name, _content(path, f"{key}.{name}", token)) for name, token in tokens.items()
            ]
        elif tokens is None or isinstance(tokens, list):
            pairs = [(None, _content(path, key, token)) for token in tokens or ()]
        else:
            kind = type(tokens).__name__
            raise ModelError(f"{path}: {key} must be a list or an object, is a {kind}")
        yield from ((name, content) for name, content in pairs if content is not None)


def _added_tokens(folder: Path, config: Mapping[str, Any]) -> Iterator[AddedToken]:
    path = folder / "tokenizer_config.json"
    entries = config.get("added_tokens_decoder") or {}
    try:
        for key, entry in sorted(entries.items(), key=lambda item: int(item[0])):
            options = {
                name: bool(entry[name])
                for name in ("lstrip", "rstrip", "normalized", "single_word")
                if name in entry
            }
            content = _content(path, f"added_tokens_decoder.{key}", entry) or ""
            yield AddedToken(int(key), content, bool(entry.get("special")), options)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{path}: added_tokens_decoder is malformed ({error!r})") from error
