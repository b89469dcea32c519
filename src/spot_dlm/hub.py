"""Drafters on the Hugging Face hub: fetched by id, pushed as a folder of three files. What goes wrong is one line.

Login, cache, endpoint and offline mode are huggingface_hub's own (`hf auth login`, HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE). Knows nothing of
commands. Example: `build_drafter("order", file=find_drafter("owner/name@v1"))`.
"""

import re
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from spot_dlm.drafter_files import CONFIG, REPOSITORY, WEIGHTS, load_fitted, read_config

CARD = "README.md"
FILES = (CONFIG, WEIGHTS, CARD)
"""What a drafter's repository holds."""
_ID = re.compile(rf"(?P<repo>{REPOSITORY})(@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True)
class Upload:
    """What a push sends: the files with their bytes, and where the repository is (empty where nothing was sent)."""

    repo: str
    files: dict[str, int]
    url: str = ""


def find_drafter(place: str | Path) -> Path:
    """Return the folder of a drafter: the place itself, or what is fetched where it is a hub id, owner/name or owner/name@revision.

    A name whose first part is a folder here is taken for a path.

    Raises:
        ValueError: if the hub has no such repository or revision or cannot be reached, or the repository holds no drafter.
    """
    if not str(place).strip():
        raise ValueError("the name of a drafter is empty; give a folder or hub id (owner/name[@revision])")
    path = Path(place).expanduser()
    found = _ID.fullmatch(str(place))
    if path.exists() or found is None or Path(str(place).partition("/")[0]).is_dir():
        return path
    repo, revision = found["repo"], found["revision"]
    folder = _fetch(str(place), repo, revision, [CONFIG])  # alone first: whatever else the repository holds may be large
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{place}: the repository has no config.json, so it is no drafter")
    try:
        read_config(folder)
    except ValueError as error:
        raise ValueError(f"{place}: {str(error).removeprefix(f'{folder}: ')}") from error
    return _fetch(str(place), repo, revision, list(FILES))


def _fetch(place: str, repo: str, revision: str | None, files: list[str]) -> Path:
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=files))
    except Exception as error:  # httpx, OSError and huggingface_hub's own
        raise ValueError(f"{place} is no folder here and cannot be fetched from the hub: {_reason(error, repo, revision)}") from error


def push_drafter(folder: Path, repo: str, private: bool = False, dry_run: bool = False) -> Upload:
    """Check a drafter's folder and send it to the hub, in one commit; a dry run only says what would be sent.

    Raises:
        ValueError: if the folder is no whole drafter with a card, the id is none, or the hub refuses.
    """
    import huggingface_hub

    if not re.fullmatch(REPOSITORY, repo):
        raise ValueError(f"--repo {repo!r} must be owner/name")
    load_fitted(folder)
    if not (folder / CARD).is_file():
        raise ValueError(f"{folder}: has no {CARD}; 'spot drafter save {folder} --out NEW' writes one")
    upload = Upload(repo, {name: (folder / name).stat().st_size for name in FILES})
    if dry_run:
        return upload
    if huggingface_hub.get_token() is None:
        raise ValueError("not logged in to the hub; run 'hf auth login' or set HF_TOKEN")
    api = huggingface_hub.HfApi(library_name="spot-dlm", library_version=version("spot-dlm"))
    message = f"Drafter ({read_config(folder)['kind']}) by spot-dlm {version('spot-dlm')}"
    done: Any = None
    try:
        api.create_repo(repo, private=private or None, exist_ok=True)
        is_public = private and not api.repo_info(repo).private
        if not is_public:
            done = api.upload_folder(repo_id=repo, folder_path=folder, allow_patterns=list(FILES), commit_message=message)
    except Exception as error:  # httpx, OSError and huggingface_hub's own
        raise ValueError(f"{repo}: nothing was pushed: {_reason(error, repo, None)}") from error
    if is_public:
        raise ValueError(f"{repo} exists and is public; make it private on its page, or leave out --private")
    return Upload(repo, upload.files, str(getattr(done, "commit_url", done)))


def _reason(error: Exception, repo: str, revision: str | None) -> str:
    """Return what huggingface_hub's exceptions mean, in a line."""
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if isinstance(error, errors.GatedRepoError):
        return f"{repo} is gated; ask for access on its page and log in ('hf auth login')"
    if isinstance(error, errors.RepositoryNotFoundError) or status == 401:
        return f"no repository {repo} there, or it is private and you are not logged in ('hf auth login')"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo} has no revision {revision!r}"
    if status == 403:
        return f"your token may not write to {repo} (403)"
    if isinstance(error, errors.OfflineModeIsEnabled) or isinstance(error.__cause__, errors.OfflineModeIsEnabled):
        return f"offline mode is on (HF_HUB_OFFLINE) and {repo} is not in the local cache"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return f"the hub cannot be reached and {repo} is not in the local cache ({first[:160]})"
    return f"{type(error).__name__}: {first[:200]}"
