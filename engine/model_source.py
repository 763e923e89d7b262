"""What MODEL may be: the bundled model, a folder, or the id of a Hugging Face repository."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from engine.checkpoint import no_weights_message, weight_files
from engine.errors import ModelError
from engine.models.json_config import JsonConfig, read_json_object

BUNDLED = "bundled"
BUNDLED_FOLDER = Path(__file__).parent / "bundled"

CONFIG_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
WEIGHT_FILES = ("*.safetensors",)
# Sub-folders hold other formats of the same weights, but for additional_chat_templates;
# `consolidated` is Mistral's own.
IGNORED_FILES = ("[!a]*/*", "a[!d]*/*", "ad[!d]*/*", "consolidated*")


@dataclass(frozen=True)
class ModelSource:
    """A folder with config.json, tokenizer and weights, and how it came to be here."""

    name: str  # as the user wrote it
    folder: Path
    commit: str | None = None  # of the hub's repository

    @cached_property
    def config_values(self) -> dict[str, object]:
        return read_json_object(self.folder / "config.json")

    @property
    def config(self) -> JsonConfig:
        return JsonConfig(self.config_values, str(self.folder / "config.json"))


def resolve_model(
    model: str,
    revision: str | None = None,
    download_dir: str | None = None,
    *,
    weights: bool = True,
) -> ModelSource:
    """Finds or downloads a model; without `weights` only config and tokenizer are asked for."""
    try:
        folder = _local_folder(model)
        if folder is None:
            source = _download(model, revision, download_dir, weights)
        elif revision is None:
            source = ModelSource(model, folder)
        else:
            raise ModelError(f"revision: {revision!r} means nothing for the folder {model}")
        if not (source.folder / "config.json").is_file():
            raise ModelError(f"{source.folder}: config.json: missing")
        if weights:
            weight_files(source.folder)
    except OSError as error:  # somebody else's folder, or a name too long for any
        raise ModelError(f"{model}: cannot be read: {error}") from error
    return source


def _local_folder(model: str) -> Path | None:
    if model == BUNDLED:
        return BUNDLED_FOLDER
    try:
        path = Path(model).expanduser()
    except RuntimeError as error:  # of nobody, or of one without a home
        raise ModelError(f"{model}: no such folder: {error}") from error
    if path.is_dir():
        return path
    if path.exists():
        raise ModelError(f"{model}: is a file; a folder with config.json and weights is needed")
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ModelError(f"{model}: no such folder")
    return None


def _download(
    model: str, revision: str | None, download_dir: str | None, weights: bool
) -> ModelSource:
    """Token, endpoint and offline mode are huggingface_hub's own environment variables."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    wanted = CONFIG_FILES + WEIGHT_FILES if weights else CONFIG_FILES
    try:
        folder = Path(
            snapshot_download(
                model,
                revision=revision,
                cache_dir=download_dir,
                allow_patterns=list(wanted),
                ignore_patterns=list(IGNORED_FILES),
            )
        )
    except HFValidationError as error:
        raise ModelError(f"{model}: neither a folder nor a Hugging Face id: {error}") from error
    except _hub_errors() as error:
        raise ModelError(f"{model}: {_download_failure(revision, error)}") from error
    if weights and not any(folder.glob("*.safetensors")):
        raise ModelError(f"{model}: {no_weights_message(_repository_files(model, folder.name))}")
    return ModelSource(model, folder, commit=folder.name)


def _download_failure(revision: str | None, error: Exception) -> str:
    from huggingface_hub import constants, errors

    match error:
        case errors.GatedRepoError():
            return "is gated: accept its terms on the hub, and set HF_TOKEN to a token of yours"
        case errors.RepositoryNotFoundError():
            return (
                "no such folder, and no such repository on the hub"
                " (or a private one that HF_TOKEN does not open)"
            )
        case errors.RevisionNotFoundError():
            return f"revision: the repository has no {revision!r}"
        case errors.LocalEntryNotFoundError() if constants.HF_HUB_OFFLINE:
            return "not, or not wholly, in the download folder, and HF_HUB_OFFLINE is set"
        case errors.LocalEntryNotFoundError():
            return (
                "no such folder, not in the download folder either, and the hub cannot be"
                f" reached: {error.__cause__}"
            )
        case _:
            return f"the download failed: {type(error).__name__}: {error}"


def _repository_files(model: str, commit: str) -> list[str]:
    """For an error message only, so without an answer there are none."""
    from huggingface_hub import HfApi

    try:
        return HfApi().list_repo_files(model, revision=commit)
    except _hub_errors():
        return []


def _hub_errors() -> tuple[type[Exception], ...]:
    """`HTTPError` is that of whichever HTTP client this release of the library is built on."""
    from huggingface_hub import errors

    return (errors.HTTPError, OSError)  # type: ignore[attr-defined]
