"""Generation: batches, ends, limits, streaming."""

import pytest
import torch
from torch import Tensor

import anyformer as af
from anyformer.text.tokenizer import BPETokenizer, ByteTokenizer


def small(vocab_size: int = 257, **changes: object) -> af.Transformer:
    block = af.Block.pre(af.Attention(2, position=af.Rotary()), af.GatedFFN(24), norm=af.RMSNorm())
    spec = af.TransformerSpec(16, vocab_size, decoder=af.cycle([block], 2), final_norm=af.RMSNorm())
    for path, value in changes.items():
        spec = spec.replace(path, value)
    return spec.build().eval()


class Scripted(torch.nn.Module):
    """Makes a model say a fixed sequence in each row, whatever it is given."""

    def __init__(self, model: af.Transformer, script: list[list[int]]) -> None:
        super().__init__()
        self.script, self.step, self.vocab_size = script, -1, model.spec.vocab_size
        model.head = self

    def forward(self, x: Tensor, tokens: object = None) -> Tensor:
        self.step += 1
        logits = torch.zeros(*x.shape[:2], self.vocab_size)
        for row, tokens in enumerate(self.script):
            logits[row, -1, tokens[self.step]] = 9.0
        return logits


def greedy_without_cache(model: af.Transformer, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def test_batches_of_different_lengths_equal_each_row_alone() -> None:
    model = small()
    prompts = [[3, 1, 4, 1, 5], [9], [2, 6, 5]]
    made = af.generate(model, prompts, max_new_tokens=12)
    assert made.ids == [greedy_without_cache(model, prompt, 12) for prompt in prompts]
    assert made.reasons == ["length"] * 3


def test_sampled_rows_depend_on_their_number_and_seed_only() -> None:
    model = small()
    prompts = [[3, 1, 4], [3, 1, 4], [2, 6]]
    first = af.generate(model, prompts, max_new_tokens=8, temperature=1.0, seed=5)
    again = af.generate(model, [[3, 1, 4], [7, 7, 7, 7], [2, 6]], max_new_tokens=8, temperature=1.0, seed=5)
    assert first.ids[0] != first.ids[1]
    assert [first.ids[0], first.ids[2]] == [again.ids[0], again.ids[2]]


def test_fault_63_each_row_ends_by_itself() -> None:
    a, b, c, d, end, other_end, x = 10, 11, 12, 13, 14, 15, 16
    model = small()
    Scripted(model, [[a, end, x, x, x], [b, c, d, other_end, x]])
    made = af.generate(model, [[end, 1], [2, 3]], max_new_tokens=9, end_ids=[end, other_end])
    assert made.ids == [[a, end], [b, c, d, other_end]]
    assert made.reasons == ["end", "end"]


def test_fault_63_end_tokens_wait_for_the_minimum() -> None:
    end = 14
    model = small()
    Scripted(model, [[end] * 9])
    made = af.generate(model, [[1]], max_new_tokens=9, end_ids=[end], min_new_tokens=3)
    assert len(made.ids[0]) == 4
    assert end not in made.ids[0][:3]
    assert made.ids[0][3] == end


def test_fault_28_positions_run_out_with_reason_length() -> None:
    model = small(**{"decoder.*.mixer.position": None, "embed.position": af.Learned(16)})
    made = af.generate(model, [list(range(1, 15))], max_new_tokens=10)
    assert (len(made.ids[0]), made.reasons) == (2, ["length"])
    assert af.generate(model, [[1, 2]], max_new_tokens=3).reasons == ["length"]
    with pytest.raises(ValueError, match="a prompt of 16 tokens leaves no room in the model's 16 positions"):
        af.generate(model, [list(range(16))])


def test_fault_28_rows_of_different_lengths_run_out_each_in_its_time() -> None:
    model = small(**{"decoder.*.mixer.position": None, "embed.position": af.Learned(8)})
    made = af.generate(model, [[1, 2, 3, 4, 5, 6], [1, 2]], max_new_tokens=20)
    assert [len(row) for row in made.ids] == [2, 6]
    assert made.ids[1] == af.generate(model, [[1, 2]], max_new_tokens=20).ids[0]


def test_fault_20_nothing_to_do_and_empty_prompts() -> None:
    model = small()
    assert af.generate(model, [[1, 2]], max_new_tokens=0).ids == [[]]
    assert af.generate(model, [], max_new_tokens=3).ids == []
    with pytest.raises(ValueError, match="prompt 1 is empty: begin with a start token"):
        af.generate(model, [[1], []])


def test_fault_57_a_batch_with_a_greedy_and_a_sampled_row() -> None:
    model = small()
    made = af.generate(model, [[5, 6], [5, 6]], max_new_tokens=6, temperature=(0.0, 1.0), seed=3)
    assert made.ids[0] == greedy_without_cache(model, [5, 6], 6)


def test_fault_79_generation_asks_for_one_row_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    seen: list[int] = []
    model.head.register_forward_hook(lambda module, given, result: seen.append(result.shape[1]))
    af.generate(model, [[1, 2, 3, 4, 5]], max_new_tokens=4)
    assert seen == [1, 1, 1, 1]


def test_encoder_decoder_generates_from_a_padded_source() -> None:
    spec = af.preset("t5-mini").replace("decoder.num_layers", 1).replace("encoder.num_layers", 1).replace(dim=16)
    model = spec.replace(vocab_size=50).build().eval()
    source = torch.tensor([[5, 6, 7, 0, 0], [8, 9, 10, 11, 12]])
    keep = torch.tensor([[True, True, True, False, False], [True] * 5])
    both = af.generate(model, [[0], [0]], source=source, source_tokens=af.Tokens.padded(keep), max_new_tokens=6)
    alone = af.generate(model, [[0]], source=source[:1, :3], max_new_tokens=6)
    assert both.ids[0] == alone.ids[0]
    with pytest.raises(ValueError, match="give `source` ids"):
        af.generate(model, [[0]])


def say(text: str, **choices: object) -> str:
    """What `stream` gives when the model says `text` and then the end token."""
    tokenizer, model = ByteTokenizer(), small()
    Scripted(model, [[*tokenizer.encode(text), tokenizer.end_id, 65, 65]])
    return "".join(af.stream(model, tokenizer, "prompt STOP", sampling=af.Sampling(temperature=0.0), **choices))


def test_fault_64_stop_strings_across_tokens_and_never_from_the_prompt() -> None:
    assert say("abcDEFGh", stop=["DEFG"]) == "abc"
    assert say("cDE", stop=["DEFG"]) == "cDE"
    assert say("aaa", stop=["aa"]) == ""
    assert say("text", stop=["STOP"]) == "text"


def test_stream_gives_whole_characters_only() -> None:
    tokenizer, model = ByteTokenizer(), small()
    text = "数学 é 👍!"
    Scripted(model, [[*tokenizer.encode(text), tokenizer.end_id]])
    pieces = list(af.stream(model, tokenizer, "", sampling=af.Sampling(temperature=0.0)))
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_stream_is_the_decoded_text_of_generate() -> None:
    tokenizer = BPETokenizer.train(["the cat sat on the mat, 猫在垫子上"] * 4, 300)
    model = small(tokenizer.vocab_size)
    sampling, ends = af.Sampling(temperature=1.0, seed=2), tokenizer.end_ids
    made = af.generate(model, [tokenizer.encode("the cat")], max_new_tokens=30, end_ids=ends, sampling=sampling)
    streamed = af.stream(model, tokenizer, "the cat", max_new_tokens=30, sampling=sampling)
    assert "".join(streamed) == tokenizer.decode(made.ids[0])


def test_choices_are_given_one_way() -> None:
    with pytest.raises(ValueError, match="not both: temperature"):
        af.generate(small(), [[1]], sampling=af.Sampling(), temperature=0.5)


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_a_prompt_read_in_chunks_gives_the_same(chunk: int) -> None:
    """Ragged prompts, padded on the left: whole chunks of a short row are padding."""
    model = small()
    prompts = [[3, 1, 4, 1, 5, 9, 2], [2], [6, 5, 3]]
    whole = af.generate(model, prompts, max_new_tokens=6)
    assert af.generate(model, prompts, max_new_tokens=6, prefill_chunk=chunk) == whole
    alone = af.generate(model, prompts[:1], max_new_tokens=6)
    assert af.generate(model, prompts[:1], max_new_tokens=6, prefill_chunk=chunk) == alone


def test_a_chunk_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="`prefill_chunk` must be at least 1, but is 0"):
        af.generate(small(), [[1]], prefill_chunk=0)
