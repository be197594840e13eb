"""The small files beside a tokenizer: which special token has which role, the chat template, what ends a text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anyformer.files import read_json, write_text
from anyformer.text.base import Tokenizer

__all__ = [
    "added_ids",
    "chat_template_of",
    "end_ids_of",
    "listed_tokens",
    "named_roles",
    "read_optional",
    "write_config",
]

_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "mask_token", "cls_token", "sep_token")


def read_optional(folder: Path, name: str) -> dict[str, Any]:
    """The object in `folder`/`name`, empty if there is no such file."""
    return read_json(folder / name) if (folder / name).exists() else {}


def named_roles(folder: Path) -> dict[str, str]:
    """The text of the special token in each role, as the folder's files name them."""
    found = dict[str, str]()
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for role, value in read_optional(folder, name).items():
            text = value.get("content") if isinstance(value, dict) else value
            if role in _ROLES and isinstance(text, str) and text:
                found[role] = text
    return found


def listed_tokens(config: Mapping[str, Any]) -> list[tuple[int, str, bool]]:
    """The added tokens that tokenizer_config.json lists, by id: id, text, and whether it is special.

    Raises:
        ValueError: an entry is no id with a text.
    """
    listed = config.get("added_tokens_decoder") or {}
    try:
        rows = [(int(key), str(entry["content"]), bool(entry.get("special"))) for key, entry in listed.items()]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(
            "added_tokens_decoder of tokenizer_config.json must hold ids with texts, but does not; save it again."
        ) from None
    return sorted(rows)


def added_ids(folder: Path) -> dict[str, int]:
    """The tokens of added_tokens.json, with their ids.

    Raises:
        ValueError: an entry is no id.
    """
    found = read_optional(folder, "added_tokens.json")
    wrong = [f"{name!r}: {i!r}" for name, i in found.items() if not isinstance(i, int)]
    if wrong:
        raise ValueError(f"{str(folder / 'added_tokens.json')!r} must hold ids by text, but holds {wrong[0]}.")
    return found


def end_ids_of(folder: Path) -> tuple[int, ...]:
    """What ends a text: `eos_token_id` of generation_config.json, or else of config.json; may be none.

    Raises:
        ValueError: it is no id and no list of ids.
    """
    for name in ("generation_config.json", "config.json"):
        value = read_optional(folder, name).get("eos_token_id")
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise ValueError(
                f"eos_token_id of {str(folder / name)!r} is {value!r}, but must be an id or a list of ids."
            )
        if ids:
            return tuple(ids)
    return ()


def chat_template_of(folder: Path) -> str | None:
    """The chat template: chat_template.jinja, or `chat_template` of tokenizer_config.json (of several, the default).

    Raises:
        ValueError: the file is no text.
    """
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text("utf-8")
        except (OSError, ValueError) as error:
            raise ValueError(f"{str(path)!r} is no text in UTF-8 ({error}); save the template again.") from None
    found = read_optional(folder, "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):
        entries = [entry for entry in found if isinstance(entry, dict)]
        found = next((entry.get("template") for entry in entries if entry.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def write_config(folder: str | Path, config: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """Write tokenizer_config.json: `config`, the tokenizer's roles and its template; and its ends, if there are more.

    A generation_config.json there is kept, but for its `eos_token_id`.
    """
    folder = Path(folder)
    data = {**config, **tokenizer.roles}
    if tokenizer.chat_template is not None:
        data["chat_template"] = tokenizer.chat_template
    _write(folder / "tokenizer_config.json", data)
    (folder / "chat_template.jinja").unlink(missing_ok=True)  # it would win over the one just written
    if len(tokenizer.end_ids) > 1:
        settings = read_optional(folder, "generation_config.json")
        _write(folder / "generation_config.json", {**settings, "eos_token_id": list(tokenizer.end_ids)})


def _write(path: Path, data: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(data, ensure_ascii=False, indent=2) + "\n")
