"""Read text documents from a file, a folder, a glob, or the Python standard library, and account for every file."""

from __future__ import annotations

import codecs
import glob
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Document", "Skipped", "read_documents"]

# UTF-32 comes first: its little-endian mark begins with the one of UTF-16.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "idle_test"})


@dataclass(frozen=True)
class Document:
    """One text and where it came from."""

    name: str
    text: str


@dataclass(frozen=True)
class Skipped:
    """One file that was found but not used, and why."""

    name: str
    reason: str


def read_documents(source: str | Path) -> tuple[list[Document], list[Skipped]]:
    """Read all documents of `source`, in the order of their names.

    Args:
        source: "stdlib" (the `*.py` files of the running Python's standard library, without tests and installed
            packages), a file, a folder (recursive; names that start with a dot are left out), or a glob.

    Returns:
        The documents, and the files that are no readable text, each with the reason. Names are relative to the folder.

    Text is UTF-8, or UTF-16/32 with a byte order mark. A mark at the start is dropped; everything else, such as CRLF,
    a mark in the middle, or the tags of an HTML page, is kept as it stands.

    Raises:
        ValueError: `source` does not exist or matches nothing; it is one file that cannot be read as text; or none of
            its files can.
    """
    name = os.path.expanduser(source)
    if name == "stdlib":
        return _read_all(name, _library())
    if os.path.isdir(name):
        return _read_all(name, _folder(Path(name)))
    if os.path.exists(name):
        return [Document(Path(name).name, _read_named(name))], []
    return _read_all(name, _matches(name))


def _read_all(source: str, files: Iterator[tuple[str, Path]]) -> tuple[list[Document], list[Skipped]]:
    documents, skipped = [], []
    for name, path in sorted(files):
        try:
            documents.append(Document(name, _read(path)))
        except ValueError as problem:
            skipped.append(Skipped(name, str(problem)))
    if not documents:
        raise ValueError(f"{source!r} holds no text to read: {_complaint(skipped)}.")
    return documents, skipped


def _complaint(skipped: list[Skipped]) -> str:
    if not skipped:
        return "there is no file in it whose name does not start with a dot"
    return (
        f"all of its {len(skipped)} files were skipped, the first, {skipped[0].name!r}, because it {skipped[0].reason}"
    )


def _library() -> Iterator[tuple[str, Path]]:
    files = _folder(Path(sysconfig.get_path("stdlib")), _NOT_LIBRARY)
    return ((name, path) for name, path in files if path.suffix == ".py")


def _folder(root: Path, leave_out: frozenset[str] = frozenset()) -> Iterator[tuple[str, Path]]:
    """Every file below `root`; a folder that may not be listed is yielded too, so that reading it tells why."""
    closed: list[Path] = []
    for folder, folders, files in os.walk(root, onerror=lambda error: closed.append(Path(error.filename))):
        folders[:] = (name for name in folders if not name.startswith(".") and name not in leave_out)
        paths = (Path(folder, name) for name in files if not name.startswith("."))
        yield from ((path.relative_to(root).as_posix(), path) for path in paths)
    yield from ((path.relative_to(root).as_posix(), path) for path in closed)


def _matches(pattern: str) -> Iterator[tuple[str, Path]]:
    found = [path for path in glob.glob(pattern, recursive=True) if not os.path.isdir(path)]
    if not found:
        what = "matches no file" if glob.has_magic(pattern) else "does not exist"
        raise ValueError(f'{pattern!r} {what}; give a file, a folder, a glob such as "texts/**/*.txt", or "stdlib".')
    return ((path, Path(path)) for path in found)


def _read_named(name: str) -> str:
    try:
        return _read(Path(name))
    except ValueError as problem:
        raise ValueError(f"{name!r} {problem}.") from None


def _read(path: Path) -> str:
    """The text of one file, or a ValueError with the rest of a sentence that begins with the file's name."""
    try:
        # A pipe or a device would block or never end.
        data = path.read_bytes() if path.is_file() else None
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from None
    if data is None:
        raise ValueError("cannot be read (it is no regular file)")
    text = _decode(data)
    if not text:
        raise ValueError("is empty")
    return text


def _decode(data: bytes) -> str:
    mark, encoding = next(((mark, name) for mark, name in _MARKS if data.startswith(mark)), (b"", "utf-8"))
    if not mark and b"\0" in data:
        raise ValueError(f"is binary (a zero byte at offset {data.index(0)}, and no byte order mark)")
    try:
        return data[len(mark) :].decode(encoding)
    except UnicodeDecodeError as error:
        at = error.start + len(mark)
        raise ValueError(
            f"is not {encoding.upper()} (byte 0x{data[at]:02x} at offset {at}); save it as UTF-8 first"
        ) from None
