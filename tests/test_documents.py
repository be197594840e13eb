"""Reading documents: encodings are accounted for, never guessed (FAULT 84)."""

from __future__ import annotations

import codecs
import os
import re
from pathlib import Path

import pytest

from anyformer.data.documents import Document, Skipped, read_documents

PAGE = "<html><body>&amp; caf\u00e9</body></html>\r\n"


def write(folder: Path, **files: bytes) -> None:
    for name, data in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (codecs.BOM_UTF8 + b"text,label\r\n", "text,label\r\n"),
        (codecs.BOM_UTF16_LE + "text,汉字\n".encode("utf-16-le"), "text,汉字\n"),
        (codecs.BOM_UTF16_BE + "text,汉字\n".encode("utf-16-be"), "text,汉字\n"),
        (codecs.BOM_UTF32_LE + "汉👍".encode("utf-32-le"), "汉👍"),
        ("a\ufeffb".encode(), "a\ufeffb"),
        (codecs.BOM_UTF8 * 2 + b"a", "\ufeffa"),
        (b"a\r\nb\rc\n", "a\r\nb\rc\n"),
        (PAGE.encode(), PAGE),
        (b" \n", " \n"),
    ],
)
def test_fault_84_text_is_kept(tmp_path: Path, data: bytes, text: str) -> None:
    write(tmp_path, a_dot_txt=data)
    assert read_documents(tmp_path / "a.txt") == ([Document("a.txt", text)], [])


BAD = [
    (b"caf\xe9", "is not UTF-8 (byte 0xe9 at offset 3); save it as UTF-8 first"),
    (codecs.BOM_UTF8 + b"caf\xe9!", "is not UTF-8 (byte 0xe9 at offset 6); save it as UTF-8 first"),
    (codecs.BOM_UTF16_LE + b"a\0\0\xd8", "is not UTF-16-LE (byte 0x00 at offset 4); save it as UTF-8 first"),
    ("text".encode("utf-16-le"), "is binary (a zero byte at offset 1, and no byte order mark)"),
    (b"\x89PNG\r\n\0", "is binary (a zero byte at offset 6, and no byte order mark)"),
    (b"", "is empty"),
    (codecs.BOM_UTF8, "is empty"),
]


@pytest.mark.parametrize(("data", "reason"), BAD)
def test_fault_84_a_named_file_is_an_error(tmp_path: Path, data: bytes, reason: str) -> None:
    write(tmp_path, a_dot_txt=data)
    with pytest.raises(ValueError, match=re.escape(f"{str(tmp_path / 'a.txt')!r} {reason}.")):
        read_documents(str(tmp_path / "a.txt"))


@pytest.mark.parametrize(("data", "reason"), BAD)
def test_fault_84_a_found_file_is_reported(tmp_path: Path, data: bytes, reason: str) -> None:
    write(tmp_path, a_dot_txt=data, b_dot_txt="汉字".encode())
    expected = ([Document("b.txt", "汉字")], [Skipped("a.txt", reason)])
    assert read_documents(tmp_path) == expected
    documents, skipped = read_documents(str(tmp_path / "*.txt"))
    assert [document.text for document in documents] == ["汉字"]
    assert skipped == [Skipped(str(tmp_path / "a.txt"), reason)]


def test_folder_is_recursive_sorted_and_without_hidden_names(tmp_path: Path) -> None:
    write(tmp_path, b=b"1", a__z=b"2", a__b__c_dot_md=b"3", _dot_git__x=b"4", _dot_x=b"5", a__test__t=b"6")
    assert [(d.name, d.text) for d in read_documents(tmp_path)[0]] == [
        ("a/b/c.md", "3"),
        ("a/test/t", "6"),
        ("a/z", "2"),
        ("b", "1"),
    ]


def test_glob(tmp_path: Path) -> None:
    write(tmp_path, b_dot_txt=b"1", a__z_dot_txt=b"2", c_dot_md=b"3")
    assert [d.text for d in read_documents(str(tmp_path / "**" / "*.txt"))[0]] == ["2", "1"]


def test_file_whose_name_looks_like_a_glob(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text("x")
    assert read_documents(tmp_path / "a[1].txt") == ([Document("a[1].txt", "x")], [])


@pytest.mark.parametrize(("name", "what"), [("no.txt", "does not exist"), ("*.csv", "matches no file")])
def test_nothing_there(tmp_path: Path, name: str, what: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{str(tmp_path / name)!r} {what}; give a file, a folder, a glob")):
        read_documents(tmp_path / name)


def test_the_empty_name_is_not_the_working_folder() -> None:
    with pytest.raises(ValueError, match="'' does not exist"):
        read_documents("")


def test_nothing_left(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no text to read: there is no file in it"):
        read_documents(tmp_path)
    write(tmp_path, a=b"", b=b"\0")
    with pytest.raises(ValueError, match="all of its 2 files were skipped, the first, 'a', because it is empty"):
        read_documents(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    write(tmp_path, x=b"x")
    reason = "cannot be read (it is no regular file)"
    assert read_documents(tmp_path)[1] == [Skipped("broken", reason), Skipped("pipe", reason)]


def test_standard_library() -> None:
    documents, skipped = read_documents("stdlib")
    names = [document.name for document in documents]
    assert names == sorted(set(names))
    assert {"ast.py", "json/decoder.py"} <= set(names)
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {"site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test", "__pycache__"}
    assert sum(len(document.text) for document in documents) > 5_000_000
    assert all(note.name.endswith(".py") for note in skipped)
