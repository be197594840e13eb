"""How published configs write rotary positions, in both directions."""

from __future__ import annotations

from typing import Any

from anyformer.families.family import Config
from anyformer.parts.frequencies import NTK, DynamicNTK, Frequencies, Linear, Llama3, Plain, YaRN
from anyformer.parts.position import Rotary

__all__ = ["read_rotary", "write_rotary"]


def read_rotary(c: Config, *, base: float = 10000.0, fraction: float = 1.0) -> Rotary:
    """`rope_parameters`, or the older `rope_theta` and `rope_scaling`."""
    said = {**c("rope_scaling", {}), **c("rope_parameters", {})}
    kind = said.pop("rope_type", said.pop("type", "default"))
    said.pop("type", None)
    base = said.pop("rope_theta", c("rope_theta", base))
    fraction = said.pop("partial_rotary_factor", fraction)
    length = c("max_position_embeddings", None)
    c.ignore("max_position_embeddings")  # rotary positions have no end
    frequencies = _frequencies(kind, said, length)
    if said:
        raise ValueError(f"config.json: rotary scaling {kind!r} has keys that nobody reads: {', '.join(sorted(said))}")
    return Rotary(base=float(base), fraction=float(fraction), frequencies=frequencies)


def _frequencies(kind: str, said: dict[str, Any], length: Any) -> Frequencies:
    original = said.pop("original_max_position_embeddings", None)
    if kind == "default":
        return Plain()
    if said.get("factor") is None:
        raise ValueError(f"config.json: rotary scaling {kind!r} needs a 'factor'")
    factor = float(said.pop("factor"))
    if kind == "linear":
        return Linear(factor)
    if kind == "dynamic":
        return DynamicNTK(factor, length)  # transformers goes by this length alone, and so is it written
    if kind == "llama3":
        return Llama3(factor, said.pop("low_freq_factor"), said.pop("high_freq_factor"), original or length)
    if kind == "yarn":
        for name in ("mscale", "mscale_all_dim"):
            if said.get(name) is not None:
                raise ValueError(f"config.json: rotary scaling with {name!r} is not supported")
            said.pop(name, None)
        gain = said.pop("attention_factor", None)
        fast, slow = said.pop("beta_fast", None) or 32.0, said.pop("beta_slow", None) or 1.0
        return YaRN(factor, original or length, fast, slow, gain, said.pop("truncate", True))
    raise ValueError(
        f"config.json: rotary scaling {kind!r} is not supported; known: default, linear, dynamic, llama3, yarn"
    )


def write_rotary(position: Rotary) -> dict[str, Any]:
    """`rope_parameters`, and beside it what readers of older configs look for."""
    if position.layout != "half":
        raise ValueError("the hub's models turn channels i and i + half, but this model's rotary layout is interleaved")
    said: dict[str, Any] = {"rope_type": "default", "rope_theta": position.base}
    f = position.frequencies
    if isinstance(f, Linear) and f.original_len is None:
        said |= {"rope_type": "linear", "factor": f.factor}
    elif isinstance(f, DynamicNTK):
        said |= {"rope_type": "dynamic", "factor": f.factor}
    elif isinstance(f, Llama3):
        said |= {"rope_type": "llama3", "factor": f.factor, "original_max_position_embeddings": f.original_len}
        said |= {"low_freq_factor": f.low_freq_factor, "high_freq_factor": f.high_freq_factor}
    elif isinstance(f, YaRN):
        said |= {"rope_type": "yarn", "factor": f.factor, "original_max_position_embeddings": f.original_len}
        more = {"beta_fast": f.beta_fast, "beta_slow": f.beta_slow, "attention_factor": f.attention_gain}
        usual = {"beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": None, "truncate": True}
        said |= {key: value for key, value in (more | {"truncate": f.truncate}).items() if value != usual[key]}
    elif f != Plain() or isinstance(f, NTK):
        raise ValueError(f"the hub has no name for the frequency schedule {f!r}")
    if position.fraction != 1.0:
        said["partial_rotary_factor"] = position.fraction
    length = {"max_position_embeddings": f.original_len} if isinstance(f, DynamicNTK) else {}
    return {"rope_theta": position.base, "rope_parameters": said, **length}
