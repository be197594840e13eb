"""The hub's layout: a folder with config.json and weights under the names of the model's family, both ways."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from anyformer.checkpoint.tensors import Stored, cast, open_folder
from anyformer.families import FAMILIES, Family, family_for, family_of
from anyformer.families.rules import Constant, Link, Name, Rule, Skip, Tie, links, matching
from anyformer.files import gist, read_json, replacing
from anyformer.model import Transformer, TransformerSpec

__all__ = ["assemble", "hub_tensors", "load_hub", "read_hub_spec", "save_hub"]

CONFIG, WEIGHTS = "config.json", "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
SHARD = 5_000_000_000
NAMES = {torch.float64: "float64", torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def load_hub(
    folder: Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    skip: Sequence[str] = (),
) -> Transformer:
    """The model of a folder in the hub's layout, in evaluation mode."""
    return assemble(
        read_json(folder / CONFIG), open_folder(folder), device=device, dtype=dtype, skip=skip, where=folder
    )


def read_hub_spec(folder: Path) -> TransformerSpec:
    """The spec alone; the weights are looked at, not read."""
    values, stored = read_json(folder / CONFIG), open_folder(folder)
    family = family_of(values)
    return _read(family, values, family.today(stored))[0]


def assemble(
    values: Mapping[str, Any],
    stored: Mapping[str, Stored],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    skip: Sequence[str] = (),
    where: Path | str = "the checkpoint",
) -> Transformer:
    """A model from a config and tensors: everything is checked first, then each tensor is read and moved once.

    `dtype` None keeps that of the token table, for the whole model. Tensors that match a pattern in `skip` may be left
    over. On the CPU, tensors of the right dtype stay views of their file: pages are read when they are used, and
    changes stay private to the process.
    """
    family = family_of(values)
    today = family.today(stored)
    twice = sorted(stored.keys() - set(today.values()))
    if twice:
        raise ValueError(f"{where} has a tensor twice, once under its older name: {_some(twice)}")
    stored = {now: stored[name] for now, name in today.items() if not _matches(name, skip)}
    spec, rest = _read(family, values, stored)
    with torch.device("meta"):
        model = Transformer(spec)
    plan, ties = _plan(family.rules(spec), model, stored, where)
    dtype = dtype or _first_dtype(plan, stored)
    device = torch.get_default_device() if device is None else torch.device(device)
    for link in plan:
        _fill(model, link, stored, device, dtype)
    for copy, original in ties:
        if not _equal(stored[copy].read(), stored[original].read()):
            raise ValueError(f"{where}: {copy} and {original} must be equal, as the config ties them, but differ")
    model.origin = {"model_type": values["model_type"], **rest}
    return model.tie().eval()


def _read(
    family: Family, values: Mapping[str, Any], tensors: Collection[str]
) -> tuple[TransformerSpec, dict[str, Any]]:
    """What the family reads; values of types that it did not think of are the config's fault."""
    try:
        return family.read(values, tensors)
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(
            f"config.json lacks a value, or has one that a {values['model_type']} model cannot have "
            f"({type(error).__name__}: {gist(error)})"
        ) from None


def _plan(
    rules: Sequence[Rule], model: Transformer, stored: Mapping[str, Stored], where: Path | str
) -> tuple[list[Link], list[tuple[str, str]]]:
    """Which tensors become which parameters, and which must equal which. ValueError if anything does not fit."""
    parameters = {name: parameter.shape for name, parameter in model.named_parameters()}
    copies = {original: [name for name in names if name in stored] for original, names in _copies(rules).items()}
    first = {original: found[0] for original, found in copies.items() if found}
    both = [(copy, found[0]) for found in copies.values() for copy in found[1:]]
    plan = [
        link._replace(theirs=tuple(first.get(name, name) for name in link.theirs)) for link in links(rules, parameters)
    ]
    used = {name for link in plan for name in link.theirs}
    quiet = [name for rule in rules if isinstance(rule, Skip) for p in rule.theirs for name in matching(p, stored)]
    zeros = [rule.theirs[0] for rule in rules if isinstance(rule, Constant) and rule.theirs[0] in stored]
    missing = sorted(used - stored.keys())
    extra = sorted(stored.keys() - used - set(quiet) - set(zeros) - {copy for copy, _ in both})
    said = [f"{word} {_some(found)}" for word, found in (("lacks", missing), ("has unknown", extra)) if found]
    if said:
        raise ValueError(f"{where} does not fit its config: it {' and '.join(said)}")
    for name in zeros:
        if stored[name].read().count_nonzero():
            raise ValueError(f"{where}: {name} must be all zeros, but is not: such a model is not supported")
    for link in plan:
        _check(link, parameters, stored, where)
    return plan, both


def _copies(rules: Sequence[Rule]) -> dict[str, list[str]]:
    """The names under which a tied tensor may be stored, its own first; the first that is there is read."""
    found: dict[str, list[str]] = {}
    for rule in rules:
        if isinstance(rule, Tie):
            found.setdefault(rule.ours[0], [rule.ours[0]]).append(rule.theirs[0])
    return found


def _check(link: Link, parameters: Mapping[str, Any], stored: Mapping[str, Stored], where: Path | str) -> None:
    """The rule followed with shapes alone."""
    for name in link.theirs:
        if not stored[name].dtype.is_floating_point or stored[name].dtype.itemsize < 2:
            raise ValueError(f"{where}: {name} is {stored[name].dtype}, but weights must be floats of 16 bits or more")
    wanted = link.rule.write([torch.empty(parameters[name], device="meta") for name in link.ours])
    for name, tensor in zip(link.theirs, wanted, strict=True):
        if stored[name].shape != tensor.shape:
            raise ValueError(
                f"{where}: {name} must be {tuple(tensor.shape)} by the config, but is {tuple(stored[name].shape)}"
            )


def _first_dtype(plan: Sequence[Link], stored: Mapping[str, Stored]) -> torch.dtype:
    return next(stored[link.theirs[0]].dtype for link in plan if link.ours == ("tokens.weight",))


def _fill(model: nn.Module, link: Link, stored: Mapping[str, Stored], device: torch.device, dtype: torch.dtype) -> None:
    """Read, change and move what one link says; what was read and not kept is gone at the end."""
    if type(link.rule) is Name and stored[link.theirs[0]].dtype != dtype:
        return _assign(model, link.ours[0], cast(stored[link.theirs[0]], dtype).to(device))
    for name, tensor in zip(link.ours, link.rule.read([stored[name].read() for name in link.theirs]), strict=True):
        _assign(model, name, tensor.to(device=device, dtype=dtype).contiguous())
    return None


def _equal(a: Tensor, b: Tensor) -> bool:
    kind = torch.promote_types(a.dtype, b.dtype)
    return torch.equal(a.to(kind), b.to(kind))


def _assign(model: nn.Module, name: str, tensor: Tensor) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, nn.Parameter(tensor, requires_grad=tensor.is_floating_point()))


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


class Made(NamedTuple):
    """A tensor to be written: its size, and how to make it."""

    nbytes: int
    make: Callable[[], Tensor]


def save_hub(model: Transformer, folder: Path, *, shard: int = SHARD, **more: Any) -> None:
    """Write config.json and safetensors, in files of at most `shard` bytes; `more` are keys for the config.

    ValueError if no family says this model exactly.
    """
    values, tensors = hub_tensors(model)
    files = _cut(tensors, shard)
    stem, count = WEIGHTS.removesuffix(".safetensors"), len(files)
    names = [f"{stem}-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)] if count > 1 else [WEIGHTS]
    texts = {CONFIG: values | more}
    if count > 1:
        places = {tensor: name for name, part in zip(names, files, strict=True) for tensor in part}
        total = {"total_size": sum(tensor.nbytes for tensor in tensors.values())}
        texts[INDEX] = {"metadata": total, "weight_map": places}
    with ExitStack() as writing:  # all is on disk before anything takes its place: weights first, the config last
        for name, text in texts.items():
            file = writing.enter_context(replacing(folder / name, "w"))
            file.write(json.dumps(text, indent=2, sort_keys=True) + "\n")
        for name, part in zip(names, files, strict=True):
            file = writing.enter_context(replacing(folder / name))
            _write({tensor: tensors[tensor].make() for tensor in part}, file.name, folder / name)
    _clear(folder, {*texts, *names})


def _write(tensors: dict[str, Tensor], path: str, final: Path) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{final} cannot be written: {gist(error)}") from None


def _clear(folder: Path, kept: Collection[str]) -> None:
    """Remove weights of an earlier save that this one did not replace: readers might prefer them."""
    for pattern in (WEIGHTS, INDEX, "model-?????-of-?????.safetensors"):
        for path in folder.glob(pattern):
            if path.name not in kept:
                path.unlink()


def hub_tensors(model: Transformer) -> tuple[dict[str, Any], dict[str, Made]]:
    """The config of a model, and its tensors by the hub's names."""
    ours = {name: parameter.detach() for name, parameter in model.named_parameters()}
    name, values = family_for(model.spec, ours, model.origin.get("model_type", ""))
    known = model.origin if model.origin.get("model_type") == name else {}
    values = {**known, **values, "dtype": NAMES[model.dtype]}
    values.pop("torch_dtype", None)
    rules = FAMILIES[name].rules(model.spec)
    tensors = {link.theirs[0]: _made(link, ours) for link in links(rules, ours)}
    zeros = torch.zeros(1, model.spec.vocab_size, dtype=model.dtype)
    tensors |= {rule.theirs[0]: Made(zeros.nbytes, lambda: zeros) for rule in rules if isinstance(rule, Constant)}
    return values, tensors


def _made(link: Link, ours: Mapping[str, Tensor]) -> Made:
    parts = [ours[name] for name in link.ours]
    return Made(sum(part.nbytes for part in parts), lambda: link.rule.write(parts)[0].cpu().contiguous())


def _cut(tensors: Mapping[str, Made], most: int) -> list[list[str]]:
    """Names in order, in as many files as it takes."""
    files: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if files[-1] and size + tensor.nbytes > most:
            files.append([])
            size = 0
        files[-1].append(name)
        size += tensor.nbytes
    return files
