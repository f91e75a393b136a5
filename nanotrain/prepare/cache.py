"""A cache of prepared folders, one per user: `$XDG_CACHE_HOME/nanotrain`, or what the system has in its place.

A folder's name contains everything that its content depends on. Folders appear complete, under their final name, and
are copied out, so that no run depends on the cache. A cache that cannot be read or written is as if it were empty.
"""

import secrets
import shutil
from pathlib import Path

from platformdirs import user_cache_path

from nanotrain.runs.files import MARKER


def user_cache(kind: str) -> Path:
    """The folder of the user's cache for one kind of content; it need not exist."""
    return user_cache_path("nanotrain", appauthor=False) / kind


def fetch(cached: Path, target: Path) -> bool:
    """Copy a cached folder into an existing one; whether it was there. A partial copy is removed."""
    if not cached.is_dir():
        return False
    before = set(target.iterdir())
    try:
        shutil.copytree(cached, target, dirs_exist_ok=True)
    except (OSError, shutil.Error):
        for path in set(target.iterdir()) - before:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return False
    return True


def keep(folder: Path, cached: Path) -> None:
    """Copy a complete folder into the cache; does nothing where that fails or where it is already."""
    partial = cached.with_name(f".{cached.name}.{secrets.token_hex(4)}.partial")
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(folder, partial, ignore=shutil.ignore_patterns(MARKER))
        partial.rename(cached)
    except (OSError, shutil.Error):
        shutil.rmtree(partial, ignore_errors=True)
