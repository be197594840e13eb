"""Recurrent networks against torch's own modules, one row and one document at a time."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from test_linear_attention import CLOSE, LAYOUTS, PIECES, SPLITS, VOCAB, decoder, falls
from test_model import NORMED, measured_activations, measured_flops, total
from torch import Tensor, nn

import anyformer as af
from anyformer.context import Context

CELLS = ["rnn", "gru", "lstm"]
SHAPES = [{}, {"hidden": 5}, {"hidden": 7, "layers": 3}]
MIXERS = [af.Recurrent(cell, **shape) for cell, shape in itertools.product(CELLS, SHAPES)]


def alone(module: Any, x: Tensor, tokens: af.Tokens) -> Tensor:
    """Each document of each row by itself through torch's module; zeros for padding."""
    torchs = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}[module.cell.mode.split("_")[0].lower()]
    cell = torchs(module.cell.input_size, module.cell.hidden_size, module.cell.num_layers, batch_first=True).double()
    for name, weight in module.cell.named_parameters():
        getattr(cell, name).data = weight.data
    rows = []
    for row, seg in zip(x, tokens.seg, strict=True):
        out = torch.zeros(len(row), cell.hidden_size, dtype=x.dtype)
        for document in seg[seg >= 0].unique():
            here = (seg == document).nonzero()[:, 0]
            out = out.index_copy(0, here, cell(row[here][None])[0][0])
        rows.append(out)
    return module.out(torch.stack(rows))


@pytest.mark.parametrize("mixer", MIXERS, ids=repr)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_torch_one_document_at_a_time(layout: str, mixer: af.Recurrent) -> None:
    tokens, module = LAYOUTS[layout](75), mixer.build(6, {}).double()
    x = torch.randn(2, 75, 6, dtype=torch.float64, requires_grad=True)
    ours, theirs = module(x, Context(tokens))[0], alone(module, x, tokens)
    torch.testing.assert_close(ours, theirs, **CLOSE)
    if layout != "nothing":
        a, b = (torch.autograd.grad(out.square().sum(), x)[0] for out in (ours, theirs))
        torch.testing.assert_close(a, b, **CLOSE)


@pytest.mark.parametrize("cell", CELLS)
def test_plain_rows_go_through_torch_in_one_call(cell: str) -> None:
    module, x = af.Recurrent(cell, layers=2).build(6, {}), torch.randn(3, 9, 6)
    assert torch.equal(module(x, Context(af.Tokens.arange(3, 9)))[0], module.cell(x)[0])


@pytest.mark.parametrize("cell", CELLS)
def test_fault_9_and_12_padding_and_other_documents_change_nothing(cell: str) -> None:
    tokens, module, x = LAYOUTS["packed"](75), af.Recurrent(cell).build(6, {}), torch.randn(2, 75, 6)
    for document in (-1, 0, 2):
        there = (tokens.seg == document)[..., None]
        a, b = (module(y, Context(tokens))[0] for y in (x, torch.where(there, torch.randn_like(x), x)))
        assert torch.equal(a.masked_fill(there, 0), b.masked_fill(there, 0))
        assert (a[tokens.seg < 0] == 0).all()
        assert document < 0 or not torch.equal(a, b)


@pytest.mark.parametrize("mixer", MIXERS, ids=repr)
@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_decoding_equals_the_full_pass(mixer: af.Mixer, pieces: str, split: list[int]) -> None:
    model = decoder(mixer).build(dtype=torch.float64).eval()
    ids, tokens = torch.randint(0, VOCAB, (2, 11)), PIECES[pieces]
    real = torch.ones_like(ids, dtype=torch.bool) if tokens is None else tokens.real
    cache, out, begin = model.new_cache(2, 11), [], 0
    with torch.inference_mode():
        whole = model(ids, tokens)
        for length in split:
            here = slice(begin, begin + length)
            piece = None if tokens is None else tokens.map(lambda t, here=here: t[:, here])
            out.append(model(ids[:, here], piece, cache=cache))
            begin += length
    torch.testing.assert_close(torch.cat(out, 1)[real], whole[real], **CLOSE)


@pytest.mark.parametrize("mixer", MIXERS, ids=repr)
def test_a_ragged_batch_generates_what_each_prompt_does_alone(mixer: af.Mixer) -> None:
    model = decoder(mixer).build(dtype=torch.float64).eval()
    prompts = [[1, 2, 3, 4, 5, 6], [7], [8, 9, 10], [11, 12]]
    together = af.generate(model, prompts, max_new_tokens=8)
    assert together.ids == [af.generate(model, [prompt], max_new_tokens=8).ids[0] for prompt in prompts]
    ended = af.generate(model, prompts, max_new_tokens=8, end_ids=[together.ids[0][1]])
    for ids, all_ids in zip(ended.ids, together.ids, strict=True):
        assert ids == all_ids[: len(ids)], "rows that have ended go on as padding"


@pytest.mark.parametrize("mixer", [af.LinearAttention(4), af.Recurrent()], ids=repr)
def test_plain_text_behind_another_document_begins_anew(mixer: af.Mixer) -> None:
    """Row 0 ends in document 3, row 1 in document 0, with which plain text goes on."""
    model = decoder(mixer).build(dtype=torch.float64).eval()
    ids, cache = torch.randint(0, VOCAB, (2, 9)), model.new_cache(2, 9)
    with torch.inference_mode():
        model(ids[:, :5], af.Tokens.packed(torch.tensor([[1, 1, 3, 3, 3], [1, 1, 0, 0, 0]])), cache=cache)
        made = model(ids[:, 5:], af.Tokens.arange(2, 4), cache=cache)
        torch.testing.assert_close(made[:1], model(ids[:1, 5:]), **CLOSE)
        torch.testing.assert_close(made[1:], model(ids[1:, 2:])[:, 3:], **CLOSE)


@pytest.mark.parametrize("mixer", [af.LinearAttention(4), af.Recurrent()], ids=repr)
def test_mixers_share_a_stack_and_a_cache_with_attention(mixer: af.Mixer) -> None:
    layers = [af.Attention(4, pattern=af.Causal() & af.Window(3)), mixer, af.Attention(4, position=af.Rotary())]
    blocks = tuple(af.Block.pre(layer, af.DenseFFN(8), norm=af.RMSNorm()) for layer in layers)
    model = af.TransformerSpec(16, VOCAB, decoder=blocks, final_norm=af.RMSNorm()).build(dtype=torch.float64).eval()
    ids, tokens = torch.randint(0, VOCAB, (2, 11)), PIECES["left"]
    cache = model.new_cache(2, 11)
    with torch.inference_mode():
        steps = [model(ids[:, i : i + 1], tokens.map(lambda t, i=i: t[:, i : i + 1]), cache=cache) for i in range(11)]
        torch.testing.assert_close(torch.cat(steps, 1)[tokens.real], model(ids, tokens)[tokens.real], **CLOSE)


@pytest.mark.parametrize("mixer", [af.LinearAttention(4), *MIXERS[::3]], ids=repr)
def test_fault_20_empty_and_single(mixer: af.Mixer) -> None:
    model = decoder(mixer).build()
    for batch, length in ((0, 3), (2, 0), (2, 1)):
        out = model(torch.zeros(batch, length, dtype=torch.long))
        assert out.shape == (batch, length, VOCAB)
        assert out.isfinite().all()


@pytest.mark.parametrize("mixer", MIXERS, ids=repr)
def test_state_is_counted_and_does_not_grow(mixer: af.Recurrent) -> None:
    spec = decoder(mixer)
    sizes = {length: spec.build().new_cache(3, length).nbytes for length in (4, 4000)}
    assert sizes[4] == sizes[4000] == 3 * 4 * total(spec, 4).cache


@pytest.mark.parametrize("mixer", MIXERS, ids=repr)
def test_costs_are_what_is_measured(mixer: af.Recurrent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without oneDNN, whose LSTM torch's counter does not know."""
    monkeypatch.setattr("test_model.ids", lambda batch=1: torch.randint(0, VOCAB, (batch, 50)))
    spec = decoder(mixer, dim=32, final_norm=NORMED["norm"]).replace("decoder.*.branches.*.pre", NORMED["norm"])
    said = total(spec, 50)
    assert said.params == sum(p.numel() for p in spec.build().parameters())
    torch._C._set_mkldnn_enabled(False)
    try:
        assert measured_flops(spec) == said.flops
        assert measured_activations(spec) / said.activations == pytest.approx(1.0, abs=0.1)
    finally:
        torch._C._set_mkldnn_enabled(True)


def test_an_encoder_is_refused() -> None:
    block = af.Block.pre(af.Recurrent(), norm=af.RMSNorm())
    with pytest.raises(af.SpecError) as refused:
        af.TransformerSpec(8, VOCAB, encoder=(block,))
    assert str(refused.value) == (
        "encoder.0.mixer: a recurrent network reads left to right, so in an encoder no token would see a later one: "
        "use a decoder"
    )
    with pytest.raises(af.SpecError, match="cell: must be 'rnn', 'gru' or 'lstm', but is 'qrnn'"):
        af.Recurrent("qrnn")


def test_yaml_and_paths() -> None:
    spec = decoder(af.Recurrent("lstm", hidden=5, layers=2))
    assert af.TransformerSpec.from_yaml(spec.to_yaml()) == spec
    changed = af.preset("gpt-mini").replace("decoder.*.mixer.kind", "recurrent")
    assert {block.mixer for block in changed.decoder} == {af.Recurrent()}


def test_saved_and_loaded_it_is_the_same(tmp_path: Path) -> None:
    """Also with weights that were made without numbers, which torch's modules keep in a second list."""
    model, ids = decoder(af.Recurrent("lstm", hidden=5, layers=2)).build().eval(), torch.randint(0, VOCAB, (2, 9))
    af.save(model, tmp_path / "run")
    assert torch.equal(af.load(tmp_path / "run").model(ids), model(ids))


@pytest.mark.parametrize("cell", CELLS)
def test_trains_and_generates_through_the_commands(cell: str, tmp_path: Path) -> None:
    falls(tmp_path, "decoder.*.mixer.kind=recurrent", f"decoder.*.mixer.cell={cell}")
