"""FSDP: two processes with a shard each train what one process trains, and either goes on with what the other saved."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import anyformer as af
from anyformer.train.loop import Loss, Task, Trainer, TrainSpec, Watcher

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch is built without torch.distributed's gloo"
)

RANKS, FIRST, STEPS, ROWS = 2, 3, 5, 4
DTYPES = {"float32": torch.float32, "float64": torch.float64}
ROUND_OFF = {"float32": 1e-6, "float64": 1e-13}  # sums over two halves of a batch are rounded otherwise
LAYER = af.Block.pre(
    af.Attention(2, num_kv_heads=1, pattern=af.Causal(), position=af.Rotary()),
    af.GatedFFN(13, activation="silu"),
    norm=af.RMSNorm(),
)
SPEC = af.TransformerSpec(
    8, 11, embed=af.Embed(tied=True), decoder=af.cycle([LAYER], 2), final_norm=af.RMSNorm()
)  # 11 and 13 rows: no two equal shards


class Share(Task):
    """Every rank's rows of batches that all ranks know."""

    def batch(self, step: int) -> Tensor:
        rows = torch.randint(SPEC.vocab_size, (ROWS, 7), generator=torch.Generator().manual_seed(step))
        return rows.chunk(RANKS)[dist.get_rank()] if dist.is_initialized() else rows

    def loss(self, model: af.Transformer, batch: Tensor) -> Loss:
        logits, targets = model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
        return Loss(nn.functional.cross_entropy(logits, targets, reduction="sum"), torch.tensor(targets.numel()))

    def evaluate(self, model: af.Transformer, last: bool) -> dict[str, float]:
        return {}


def train(start: Path | None, end: Path, steps: int, dtype: torch.dtype) -> None:
    """Go on from what `start` holds (None: from fresh weights), sharded where there are ranks; save what comes out."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    torch.manual_seed(0)
    model = SPEC.build(dtype=dtype) if start is None else af.load(start).model
    if dist.is_initialized():
        shard(model)
    plan = TrainSpec(steps=STEPS, evaluations=1, optimizer=af.AdamW(clip=0.1))
    trainer = Trainer(model, Share(), plan, Watcher(), lambda trainer: None)
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    if start is not None:
        saved = torch.load(start / "rest.pt", weights_only=True)
        trainer.step = saved["step"]
        set_optimizer_state_dict(model, trainer.optimizer, saved["optimizer"], options=whole)
    norms = [trainer.train_step()["grad_norm"] for _ in range(steps)]
    held = [weight for group in trainer.optimizer.param_groups for weight in group["params"]]
    assert len({id(weight) for weight in held}) == len(held) == len(list(model.parameters()))
    assert model.head.weight is model.tokens.weight

    full = get_model_state_dict(model, options=whole)
    optimizer = get_optimizer_state_dict(model, trainer.optimizer, options=whole)
    if full:  # rank 0 alone has it
        plain = SPEC.build(init=None, dtype=dtype)
        plain.load_state_dict(full)
        assert torch.equal(full["head.weight"], full["tokens.weight"])
        af.save(plain, end)
        torch.save({"step": trainer.step, "optimizer": optimizer, "norms": norms}, end / "rest.pt")
    if dist.is_initialized():
        dist.barrier()


def shard(model: af.Transformer) -> None:
    """Each block, then the rest: every parameter is held once, by all ranks together."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.decoder.layers:
        fully_shard(layer)
    fully_shard(model)
    mine = sum(weight.to_local().numel() for weight in model.parameters())
    held = torch.tensor([mine, mine**2])
    dist.all_reduce(held)
    params = sum(cost.params for cost in SPEC.costs(1).values())
    assert held[0] == params == sum(weight.numel() for weight in model.parameters())
    assert held[1] < params**2  # not all by one


def ranks(rank: int, folder: Path) -> None:
    """What one of the processes does: the first steps, then the last ones from either's save."""
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", f"file://{folder}/ranks", timeout=limit, world_size=RANKS, rank=rank)
    try:
        for name, dtype in DTYPES.items():
            place = folder / name
            train(None, place / "2", FIRST, dtype)
            train(place / "1", place / "1-2", STEPS - FIRST, dtype)
            train(place / "2", place / "2-2", STEPS - FIRST, dtype)
    finally:
        dist.destroy_process_group()


def test_a_sharded_run_equals_one_process_and_each_goes_on_from_the_other(tmp_path: Path) -> None:
    for name, dtype in DTYPES.items():
        train(None, tmp_path / name / "1", FIRST, dtype)
    mp.spawn(ranks, (tmp_path,), RANKS)
    for name, dtype in DTYPES.items():
        place = tmp_path / name
        train(None, place / "whole", STEPS, dtype)
        train(place / "1", place / "1-1", STEPS - FIRST, dtype)
        train(place / "2", place / "2-1", STEPS - FIRST, dtype)
        same(place / "1", place / "2", ROUND_OFF[name])
        for way in ("1-1", "1-2", "2-1", "2-2"):
            same(place / "whole", place / way, ROUND_OFF[name])


def same(one: Path, other: Path, tolerance: float) -> None:
    """Weights, groups, and what the optimiser holds of each parameter, by name: all that a run goes on from."""
    wanted, found = (dict(af.load(place).model.named_parameters()) for place in (one, other))
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        assert (found[name] - weight).abs().max() <= tolerance, name
    before, after = (torch.load(place / "rest.pt", weights_only=True) for place in (one, other))
    assert after["norms"] == pytest.approx(before["norms"][-len(after["norms"]) :], rel=1e-5)
    before, after = before["optimizer"], after["optimizer"]
    assert groups(after) == groups(before)
    assert after["state"].keys() == before["state"].keys() == wanted.keys()
    for name, state in before["state"].items():
        assert after["state"][name].keys() == state.keys() == {"step", "exp_avg", "exp_avg_sq"}
        for key, tensor in state.items():
            gap = (after["state"][name][key] - tensor).abs().max()
            assert gap <= 100 * tolerance * tensor.abs().max(), f"{key} of {name}"


def groups(state: dict[str, Any]) -> list[dict[str, Any]]:
    return [group | {"betas": tuple(group["betas"])} for group in state["param_groups"]]  # torch loads them as a list
