"""`anyformer chat`: a conversation in the terminal, or with messages from a pipe.

Only answers are printed on the output; all else goes to the error stream.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import click

from anyformer.accelerate.quantize import Bits
from anyformer.cli.running import ready
from anyformer.generate.chat import Chat
from anyformer.generate.sampling import Sampling

__all__ = ["chat"]


def chat(
    source: str,
    *,
    system: str | None,
    max_new_tokens: int,
    stop: tuple[str, ...],
    dtype: str | None,
    bits: Bits | None,
    load: Path | None,
    **choices: Any,
) -> None:
    """Answer message after message until there are no more. `load` is a conversation to go on with."""
    sampling = Sampling(**choices)
    model, tokenizer = ready(source, dtype, bits)
    talk = Chat(model, tokenizer, sampling=sampling, max_new_tokens=max_new_tokens, stop=stop)
    if load is not None:
        talk.load(load)
    if system is not None:
        talk.system = system
    _tell(f"{source}: write a message; /help lists the commands, Ctrl-D leaves")
    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):  # not on every system; `input` edits lines with it
            import readline  # noqa: F401
    try:
        while True:
            _take(talk, _message(terminal))
    except (EOFError, KeyboardInterrupt):
        if terminal:
            _tell("")


def _message(terminal: bool) -> str:
    """A line, and those after it as long as they end in a backslash. EOFError when there are no more."""
    lines: list[str] = []
    while True:
        try:
            line = input(("... " if lines else "> ") if terminal else "")
        except EOFError:
            if not lines:
                raise
            line = ""
        if not line.endswith("\\"):
            return "\n".join([*lines, line])
        lines.append(line[:-1])


def _take(talk: Chat, message: str) -> None:
    """Do what a message asks for; a mistake is said, and the conversation goes on."""
    try:
        if message.startswith("/"):
            name, _, rest = message.partition(" ")
            COMMANDS.get(name, (_unknown, ""))[0](talk, rest.strip())
        elif message.strip():
            _show(talk, talk.say(message))
    except ValueError as error:
        _tell(str(error))


def _show(talk: Chat, pieces: Generator[str, None, None]) -> None:
    """Print an answer as it is made. Ctrl-C ends it, and keeps what was shown."""
    with contextlib.closing(pieces):
        try:
            for piece in pieces:
                click.echo(piece, nl=False)
        except KeyboardInterrupt:
            pass
    click.echo()
    if talk.reason == "length":
        _tell("(the answer was cut: no more tokens are allowed, or the model has no position left)")
    if talk.notice:
        _tell(f"({talk.notice})")


def _tell(text: str) -> None:
    click.echo(text, err=True)


def _again(talk: Chat, rest: str) -> None:
    _show(talk, talk.again())


def _reset(talk: Chat, rest: str) -> None:
    talk.reset()
    _tell("the conversation begins anew")


def _system(talk: Chat, rest: str) -> None:
    talk.system = rest or None
    _tell("the system message is set" if rest else "there is no system message now")


def _save(talk: Chat, rest: str) -> None:
    path = _path("save", rest)
    try:
        talk.save(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from None
    _tell(f"wrote {path}")


def _load(talk: Chat, rest: str) -> None:
    talk.load(path := _path("load", rest))
    _tell(f"read {path}: the conversation has {len(talk.messages)} messages")


def _path(name: str, said: str) -> Path:
    if not said:
        raise ValueError(f"/{name} needs the path of a file: /{name} talk.json")
    return Path(said).expanduser()


def _help(talk: Chat, rest: str) -> None:
    width = max(map(len, COMMANDS))
    for name, (_, said) in COMMANDS.items():
        _tell(f"{name:{width}}  {said}")
    _tell(
        "A line that ends in a backslash goes on in the next one; a message that begins with / has a space before it."
    )


def _exit(talk: Chat, rest: str) -> None:
    raise EOFError


def _unknown(talk: Chat, rest: str) -> None:
    raise ValueError(f"there is no such command; there are {', '.join(COMMANDS)}")


COMMANDS: dict[str, tuple[Callable[[Chat, str], None], str]] = {
    "/again": (_again, "drop the last answer, and draw another one"),
    "/system": (_system, "TEXT: set the system message; without TEXT, take it away"),
    "/reset": (_reset, "forget all but the system message"),
    "/save": (_save, "PATH: write the conversation to a file"),
    "/load": (_load, "PATH: go on with the conversation in a file"),
    "/help": (_help, "list the commands"),
    "/exit": (_exit, "leave; also Ctrl-C or Ctrl-D at the prompt"),
}
