"""Heat maps of who looks at whom, for people: the numbers of an attention as colours, with its tokens beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LinearSegmentedColormap, Normalize, PowerNorm
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from torch import Tensor

from anyformer.inspect.plot import _FAINT, _HELD_OUT, _INK, _TRAIN, _drawable, _families, _save, _title

__all__ = ["plot_heat"]

Heat = Float[Tensor, "_ _"]

_SIGNED = LinearSegmentedColormap.from_list("signed", [_HELD_OUT, "#ffffff", _TRAIN]).with_extremes(bad="#c9cdd4")
_SHARE = LinearSegmentedColormap.from_list("share", ["#ffffff", _TRAIN]).with_extremes(bad="#c9cdd4")
_NAMED, _WRITTEN = 64, 8  # tokens are named, and numbers written into their cells, up to so many a side
_LONG = 14  # characters of a token's text that are shown


def plot_heat(
    path: str | Path,
    maps: Mapping[str, Heat],
    *,
    labels: Sequence[str] | None = None,
    key_labels: Sequence[str] | None = None,
) -> None:
    """Write a PNG with the maps (T, S) in one row: queries down, keys across. Blue is above 0, red below, grey is -inf.

    `labels` name the queries and `key_labels` the keys. ValueError if there is no map, or they are not as many.
    """
    if not maps:
        raise ValueError("maps must hold at least 1 map to draw, but is empty; give a name and a (T, S) tensor.")
    arrays = {name: heat.detach().cpu().double().numpy() for name, heat in maps.items()}
    for name, array in arrays.items():
        for what, names, size in zip(("labels", "key_labels"), (labels, key_labels), array.shape, strict=True):
            if names is not None and len(names) != size:
                raise ValueError(f"`{what}` must be {size} for {name!r}, one a token, but are {len(names)}.")
    height, width = (
        min(max(4.2, 1.5 + 0.14 * max(sizes)), 9.0) for sizes in zip(*map(np.shape, arrays.values()), strict=True)
    )
    figure = Figure(figsize=(width * len(arrays) + 0.6, height), dpi=150, layout=ConstrainedLayoutEngine(w_pad=0.1))
    for place, (name, array) in enumerate(arrays.items(), start=1):
        _draw(figure.add_subplot(1, len(arrays), place), name, array, labels, key_labels)
    _save(figure, path)


def _draw(
    axes: Axes,
    name: str,
    array: NDArray[np.float64],
    labels: Sequence[str] | None,
    key_labels: Sequence[str] | None,
) -> None:
    _title(axes, name, width=36, pad=20)
    axes.set_xlabel("key", color=_INK)
    axes.set_ylabel("query", color=_INK)
    known = array[np.isfinite(array)]
    note = f"{known.min():.3g} to {known.max():.3g}" if known.size else "nothing is seen"
    axes.annotate(note, (0, 1), xytext=(0, 6), xycoords="axes fraction", textcoords="offset points", color=_FAINT)
    axes.spines[:].set_visible(False)
    axes.tick_params(colors=_INK, length=0, labelsize=8)
    if not array.size:
        axes.set(xticks=[], yticks=[])
        return
    most = float(np.abs(known).max(initial=0.0)) or 1.0
    signed = bool((known < 0).any())
    shown = np.where(np.isfinite(array), array, np.nan)
    norm = Normalize(-most, most) if signed else PowerNorm(0.5, 0.0, most)  # small shares can be seen too
    axes.imshow(shown, cmap=_SIGNED if signed else _SHARE, norm=norm, aspect="auto")
    _name(axes.yaxis, labels, rotation=0)
    _name(axes.xaxis, key_labels, rotation=90)
    if max(array.shape) <= _WRITTEN:
        _write(axes, array, (0.6 if signed else 0.4) * most)


def _name(axis: Axis, labels: Sequence[str] | None, rotation: int) -> None:
    if labels is None or len(labels) > _NAMED:
        axis.set_major_locator(MaxNLocator(nbins=7, integer=True, min_n_ticks=1))
        return
    families = _families()
    short = (label if len(label) <= _LONG else label[: _LONG - 1] + "…" for label in labels)
    shown = [_drawable(label.replace("\n", "\\n"), families) for label in short]
    size = 8 if len(labels) <= 32 else 5
    axis.set_ticks(
        range(len(labels)), shown, rotation=rotation, fontfamily=list(families), fontsize=size, parse_math=False
    )


def _write(axes: Axes, array: NDArray[np.float64], dark: float) -> None:
    """Each number in its cell, light on dark and dark on light."""
    for (row, column), value in np.ndenumerate(array):
        color = "white" if np.isfinite(value) and abs(value) > dark else _INK
        said = "-∞" if np.isneginf(value) else f"{value:.2f}"
        axes.text(column, row, said, ha="center", va="center", color=color, fontsize=8)
