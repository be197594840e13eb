"""Files: written safely (a file is the old one or the whole new one, never half of it), and read with plain words."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

__all__ = ["gist", "read_json", "replacing", "write_text"]


@contextlib.contextmanager
def replacing(path: str | Path, mode: str = "wb") -> Iterator[IO[Any]]:
    """Open a temporary neighbour of `path` for writing; on success sync it and rename it over `path`.

    If the body raises (disk full, Ctrl-C, a bug), the temporary file goes and `path` stays as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(handle)
    try:
        encoding, newline = (None, None) if "b" in mode else ("utf-8", "")
        with open(temporary, mode, encoding=encoding, newline=newline) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    _sync_folder(path.parent)


def write_text(path: str | Path, text: str) -> None:
    """Write `text` as UTF-8 to `path`, safely."""
    with replacing(path, "w") as file:
        file.write(text)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. ValueError if it cannot be read, is damaged, or holds something else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged, it is not JSON: {gist(error)}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold an object, but holds a {type(data).__name__}")
    return data


def gist(error: Exception) -> str:
    """The first sentence of what another library said."""
    text = re.sub(r"\x1b\[[\d;]*m", "", str(error)).strip() or type(error).__name__
    return re.split(r"\.?\s*\n|\.\s+(?=[A-Z])", text, maxsplit=1)[0].rstrip(". ")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable, where the system lets a folder be opened (not on Windows)."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
