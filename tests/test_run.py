"""A run on disk: what is saved comes back; what does not fit is named."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import anyformer as af
from anyformer.checkpoint.run import load_run, read_spec, save_run
from anyformer.checkpoint.state import load_state, save_state
from anyformer.files import replacing
from anyformer.text.tokenizer import ByteTokenizer


def small(**changes: object) -> af.Transformer:
    block = af.Block.pre(af.Attention(2, position=af.RelativeBias()), af.DenseFFN(24), norm=af.LayerNorm())
    spec = af.TransformerSpec(16, 257, decoder=af.cycle([block], 2), final_norm=af.LayerNorm(), **changes)
    return spec.build().eval()


def test_fault_43_a_run_comes_back_whole(tmp_path: Path) -> None:
    model, ids = small(), torch.tensor([[1, 2, 3]])
    save_run(model, tmp_path, ByteTokenizer())
    back = load_run(tmp_path)
    assert back.spec == model.spec == read_spec(tmp_path)
    assert torch.equal(back(ids), model(ids))
    assert back.head.weight is back.tokens.weight
    assert not back.training
    names = set(load_file(tmp_path / "model.safetensors"))
    assert "head.weight" not in names
    assert sum("position.table" in name for name in names) == 1


def test_load_and_save_take_runs_with_their_tokenizer(tmp_path: Path) -> None:
    model, ids = small(), torch.tensor([[1, 2, 3]])
    af.save(model, tmp_path, ByteTokenizer())  # no family of the hub says this model
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "spec.yaml", "tokenizer.json"]
    back = af.load(tmp_path)
    assert back.spec == model.spec
    assert torch.equal(back.model(ids), model(ids))
    assert back.tokenizer is not None
    assert back.tokenizer.decode(back.tokenizer.encode("é")) == "é"


def test_a_run_without_a_tokenizer_and_in_another_type(tmp_path: Path) -> None:
    save_run(small(), tmp_path)
    assert load_run(tmp_path, dtype=torch.float64).dtype == torch.float64
    back = af.load(tmp_path, dtype="bfloat16")
    assert back.tokenizer is None
    assert back.model.dtype == torch.bfloat16


def damaged(folder: Path, change: str) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    if change == "missing":
        del tensors["tokens.weight"]
    elif change == "extra":
        tensors["stranger"] = torch.zeros(1)
    elif change == "shape":
        tensors["tokens.weight"] = torch.zeros(3, 16)
    save_file(tensors, path)
    if change == "cut":
        path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("missing", r"does not fit its spec: it lacks tokens.weight"),
        ("extra", r"does not fit its spec: it has unknown stranger"),
        ("shape", r"tokens.weight must be \(257, 16\), but is \(3, 16\)"),
        ("cut", r"is not a whole safetensors file"),
    ],
)
def test_fault_49_what_does_not_fit_is_named(tmp_path: Path, change: str, said: str) -> None:
    save_run(small(), tmp_path)
    damaged(tmp_path, change)
    with pytest.raises(ValueError, match=said):
        load_run(tmp_path)


def test_folders_that_are_no_runs(tmp_path: Path) -> None:
    for read in (load_run, read_spec):
        with pytest.raises(ValueError, match=r"has no spec\.yaml"):
            read(tmp_path)
        with pytest.raises(ValueError, match="is not a folder"):
            read(tmp_path / "nowhere")
    save_run(small(), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="the run has no weights"):
        load_run(tmp_path)


class Evil:
    """Unpickling this would create a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return (open, (self.path, "w"))


def test_fault_47_a_training_state_runs_no_code(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    torch.save({"step": 1, "optimizer": Evil(str(marker))}, tmp_path / "state.pt")
    with pytest.raises(ValueError, match="can be read safely"):
        load_state(tmp_path / "state.pt")
    assert not marker.exists()


def test_a_training_state_comes_back_or_says_why(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    with pytest.raises(ValueError, match="nothing to go on from"):
        load_state(path)
    save_state(path, {"step": 3, "x": torch.arange(3)})
    assert load_state(path)["step"] == 3
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ValueError, match="is not a training state"):
        load_state(path)


def test_fault_46_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def fail() -> None:
        with replacing(path, "w") as file:
            file.write("half of the new")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        fail()
    assert path.read_text() == "old"
    assert [found.name for found in tmp_path.iterdir()] == ["file"]
    with replacing(path, "w") as file:
        file.write("new")
    assert path.read_text() == "new"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_run_keeps_the_dtype_that_was_stored(dtype: torch.dtype, tmp_path: Path) -> None:
    """Loaded in float32, the same weights give other answers."""
    model = af.preset("gpt-mini").build(dtype=dtype).eval()
    af.save(model, tmp_path)
    loaded = af.load(tmp_path).model
    assert loaded.dtype == dtype
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(loaded(ids), model(ids))
    assert af.load(tmp_path, dtype="float32").model.dtype == torch.float32
