"""Models on the Hugging Face hub: download into the cache of the hub library, and upload."""

import re
from pathlib import Path

from cloze.launch.config.model import HubConfig
from cloze.launch.pretrained.card_examples import CARD
from cloze.launch.pretrained.sentence_transformers import LENGTH, LENGTHS, MODULE_CONFIGS, MODULES, SETTINGS
from cloze.model.config_files import SLOW_TOKENIZER_FILES, TOKENIZER_FILES
from cloze.pipeline.errors import UserError
from cloze.pipeline.extras import how_to_install
from cloze.pipeline.storage import OF_FILE_SYSTEM

_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_WEIGHTS, _PICKLED_WEIGHTS = "model.safetensors", "pytorch_model.bin"
_SILENT_SECONDS = 120.0  # without a byte from the hub; a commit of many files takes it some seconds
# What exports write, and may have written before under the same name: what the next one lacks goes with its commit.
_EXPORTED = (
    "config.json",
    _WEIGHTS,
    *TOKENIZER_FILES,
    *SLOW_TOKENIZER_FILES,
    MODULES,
    LENGTH,
    "1_Pooling/*",
    "2_Normalize/*",
    "modeling_cloze.py",
    "model.onnx",
    "onnx.json",
)
_FILES = ["config.json", _WEIGHTS, *TOKENIZER_FILES, *SLOW_TOKENIZER_FILES, CARD]
_FILES += [MODULES, *LENGTHS, SETTINGS, MODULE_CONFIGS]  # of sentence-transformers

# Explanations of the hub library's errors; each class is a subclass of those after it.
_REASONS = {
    "GatedRepoError": "its owner gives access on request: ask for it on its page, then log in with hf auth login",
    "RepositoryNotFoundError": "the hub has none of this name, or none that you may read",
    "RevisionNotFoundError": "it has no such revision",
    "LocalEntryNotFoundError": "the hub does not answer, and it is not in the local cache",
    "OfflineModeIsEnabled": "HF_HUB_OFFLINE forbids to fetch it",
}


def is_name(text: str) -> bool:
    """Whether this may be the name of a model on the hub, such as google-bert/bert-base-uncased. A path whose
    parent folder exists is not: a mistyped path is not sent to the hub.
    """
    return bool(_NAME.fullmatch(text)) and not ("/" in text and Path(text).parent.is_dir())


def fetch_model(name: str, hub: HubConfig) -> Path:
    """The folder in which the hub library keeps a model, named by its commit. Needs the extra `finetune`.

    Raises:
        UserError: the hub, or the folder, has no such model, revision or weights.
    """
    from huggingface_hub import snapshot_download

    _bound_waiting()

    def fetch(files: list[str]) -> Path:
        return Path(
            snapshot_download(
                name, revision=hub.revision, cache_dir=hub.cache_dir, local_files_only=hub.offline, allow_patterns=files
            )
        )

    try:
        folder = fetch(_FILES)
        if not (folder / _WEIGHTS).exists() and hub.pickled_weights:
            folder = fetch([_PICKLED_WEIGHTS])
    except Exception as error:  # network, names, permissions: the library raises many kinds of errors
        how = (
            "it is looked up offline; leave --offline true out to fetch it"
            if hub.offline
            else "check name and revision"
        )
        at = f" at revision {hub.revision!r}" if hub.revision else ""
        kinds = [kind.__name__ for kind in type(error).__mro__]
        reason = "" if hub.offline else next((_REASONS[kind] for kind in kinds if kind in _REASONS), kinds[0]) + "; "
        raise UserError(f"model: found no folder and no hub model {name!r}{at}: {reason}{how}") from error
    if not (folder / _WEIGHTS).exists() and not (hub.pickled_weights and (folder / _PICKLED_WEIGHTS).exists()):
        how = "" if hub.pickled_weights else "; --pickled_weights true takes its pytorch_model.bin, if it has one"
        raise UserError(f"model: found no {_WEIGHTS} of hub model {name!r}, expected its weights{how}")
    return folder


def check_push(name: str) -> None:
    """Check the login at the hub, before anything is made for an upload. Needs the extra `finetune`.

    Raises:
        UserError: the name is invalid, the library is missing, or the hub accepts no token or does not answer.
    """
    if not _NAME.fullmatch(name):
        raise UserError(f"push: found {name!r}, expected a name on the hub, as USER/NAME")
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise UserError(f"push: found no huggingface_hub, expected it; {how_to_install('finetune')}") from error
    _bound_waiting()
    try:
        HfApi().whoami()
    except Exception as error:  # network, tokens, settings: the library raises many kinds of errors
        raise UserError(
            f"push: found no way to the hub as yourself ({_said(error)}), expected a token that may write; "
            "log in by `hf auth login`, or set HF_TOKEN"
        ) from error


def push_model(folder: Path, name: str, *, private: bool) -> str:
    """Upload a folder as a model, in one commit; returns its address.

    Raises:
        UserError: a public repository of this name exists although a private one is requested, or the hub refuses.
    """
    from huggingface_hub import HfApi

    _bound_waiting()
    api = HfApi()
    kept = f"{folder} is whole; upload it by `hf upload {name} {folder}`, or remove it and export again"
    try:
        repository = api.create_repo(name, private=private, exist_ok=True)
        public = private and not api.repo_info(repository.repo_id).private
    except Exception as error:
        raise UserError(
            f"push: found no repository {name} that can be written ({_said(error)}), expected one that is yours; {kept}"
        ) from error
    if public:
        raise UserError(
            f"push: found {name} there already, which everybody can read, expected a private repository; "
            f"add --private false, or choose another name; {kept}"
        )
    try:
        api.upload_folder(
            repo_id=repository.repo_id,
            folder_path=folder,
            commit_message="Upload by cloze export",
            delete_patterns=[*_EXPORTED],
            ignore_patterns=[f"{OF_FILE_SYSTEM}/*"],
        )
    except Exception as error:
        raise UserError(f"push: {name} was not written ({_said(error)}); {kept}") from error
    return str(repository)


def _bound_waiting() -> None:
    """Let the library give up on a hub that is silent; by default it waits without end."""
    from huggingface_hub import get_session

    get_session().timeout = _SILENT_SECONDS


def _said(error: Exception) -> str:
    """Class and first line of an error of the library."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
