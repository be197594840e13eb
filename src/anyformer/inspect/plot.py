"""Pictures for people: the loss of a training run, and who may attend to whom.

Drawn with matplotlib's objects, never `pyplot`, so that no global state is touched and no window is opened.
"""

from __future__ import annotations

import functools
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from torch import Tensor

from anyformer.files import replacing

__all__ = ["plot_loss", "plot_mask", "plot_tiles", "text_mask", "text_tiles"]

Mask = Bool[np.ndarray, "_ _"] | Bool[Tensor, "_ _"]
Tiles = Int[np.ndarray, "_ _"] | Int[Tensor, "_ _"]
Numbers = NDArray[np.float64]

_TRAIN, _HELD_OUT, _INK, _FAINT = "#1f5fa8", "#d1495b", "#333333", "#8a8f98"
_SHORT = 40  # a run of fewer points is shown whole, and point by point
_SEEN = LinearSegmentedColormap.from_list("seen", ["#eef1f5", _TRAIN])
_CJK_FAMILIES = (
    *("Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans SC", "Source Han Sans SC", "Source Han Sans CN"),
    *("WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "Droid Sans Fallback", "PingFang SC", "Hiragino Sans GB"),
    *("Heiti SC", "STHeiti", "Songti SC", "Arial Unicode MS", "Microsoft YaHei", "SimHei", "SimSun"),
)


def plot_loss(
    path: str | Path,
    steps: Sequence[int | float],
    train_loss: Sequence[int | float],
    eval_steps: Sequence[int | float],
    eval_loss: Sequence[int | float],
    *,
    title: str,
) -> None:
    """Write a PNG of training and held-out loss in nats per token against the optimizer step.

    The training loss is drawn raw (light) and as a running mean (bold). The height fits what comes after the first 5 %
    of the run, so that the fall at the start does not flatten the rest; if that cuts something off, the legend says so.
    Values that are not finite leave gaps. Characters of the title that no installed font has are written as \\uXXXX.
    ValueError if steps and losses do not pair up.
    """
    train, held_out = _pairs("train_loss", steps, train_loss), _pairs("eval_loss", eval_steps, eval_loss)
    figure = Figure(figsize=(9, 5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    smooth = _running_mean(train[1])
    _draw_lines(axes, train, smooth, held_out)
    _frame_loss(axes, train, smooth, held_out)
    _label_ends(axes, [(train[0], smooth, _TRAIN), (*held_out, _HELD_OUT)])
    _title(axes, title, width=90, pad=30)
    _save(figure, path)


def plot_mask(path: str | Path, masks: Mapping[str, Mask]) -> None:
    """Write a PNG with the masks (T, S) side by side, up to four a row: queries down, keys across, dark is seen.

    ValueError if there is none.
    """
    arrays = {name: _array(mask) for name, mask in masks.items()}
    _draw_masks(path, {name: (mask, f"{_share(mask)} seen", "") for name, mask in arrays.items()})


def plot_tiles(path: str | Path, tiles: Mapping[str, Tiles]) -> None:
    """The same of tiles (n, m): EMPTY is light, PARTIAL is darker, FULL is dark (`anyformer.parts.pattern`)."""
    arrays = {name: _array(tile) for name, tile in tiles.items()}
    notes = {name: f"{_share(tile == 1)} partial, {_share(tile == 2)} full" for name, tile in arrays.items()}
    _draw_masks(path, {name: (tile / 2, notes[name], "tile of ") for name, tile in arrays.items()})


def text_tiles(tiles: Tiles) -> str:
    """The tiles (n, m) for a terminal: █ full, ▒ partial and · empty."""
    return "\n".join("".join("·▒█"[tile] for tile in row) for row in _array(tiles))


def text_mask(mask: Mask) -> str:
    """The mask (T, S) for a terminal: a line per query, a character per key, █ seen and · hidden."""
    return "\n".join("".join("█" if seen else "·" for seen in row) for row in _array(mask))


def _pairs(name: str, steps: Sequence[int | float], values: Sequence[int | float]) -> tuple[Numbers, Numbers]:
    if len(steps) != len(values):
        raise ValueError(f"{name} must have one value per step ({len(steps)}), but has {len(values)}.")
    return np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64)


def _running_mean(values: Numbers) -> Numbers:
    """Mean over a 40th of the run to each side, so that it does not lag; over less at the start, which is steep."""
    known = np.isfinite(values)
    total, count = (np.concatenate([[0.0], np.cumsum(x)]) for x in (np.where(known, values, 0.0), known))
    at = np.arange(len(values))
    reach = np.minimum(at, len(values) // 40)
    left, right = at - reach, np.minimum(at + reach + 1, len(values))
    number = count[right] - count[left]
    mean = (total[right] - total[left]) / np.maximum(number, 1)
    return np.where(known & (number > 0), mean, np.nan)


def _draw_lines(axes: Axes, train: tuple[Numbers, Numbers], smooth: Numbers, held_out: tuple[Numbers, Numbers]) -> None:
    dots = "o" if len(train[0]) < _SHORT else ""  # a line alone does not show a point between two gaps
    axes.plot(*train, color=_TRAIN, alpha=0.28, linewidth=0.8)
    axes.plot(train[0], smooth, color=_TRAIN, linewidth=2.2, marker=dots, markersize=4, label="training")
    label = "held out" if len(held_out[0]) else "_"  # matplotlib leaves "_" out of the legend
    if np.isfinite(held_out[1]).any():
        best = int(np.nanargmin(np.where(np.isfinite(held_out[1]), held_out[1], np.nan)))
        label += f" (best {held_out[1][best]:.4g} at step {held_out[0][best]:,.0f})"
    axes.plot(*held_out, color=_HELD_OUT, linewidth=1.6, marker="o", markersize=5, markeredgecolor="white", label=label)


def _frame_loss(axes: Axes, train: tuple[Numbers, Numbers], smooth: Numbers, held_out: tuple[Numbers, Numbers]) -> None:
    axes.set_xlabel("optimizer step", color=_INK)
    axes.set_ylabel("loss (nats per token)", color=_INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")
    axes.grid(color="#e6e8ec", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#b5bac2")
    axes.tick_params(colors=_INK, length=0)
    axes.margins(x=0.01)
    if axes.dataLim.width == 0:
        axes.set_xlim(axes.dataLim.x0 - 1, axes.dataLim.x0 + 1)  # one step alone would have no scale
    _fit_height(axes, train, smooth, held_out)
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=3, labelcolor=_INK)


def _fit_height(axes: Axes, train: tuple[Numbers, Numbers], smooth: Numbers, held_out: tuple[Numbers, Numbers]) -> None:
    """Fit the raw noise below, and above what the smoothed and held-out lines reach after the first 5 % of steps."""
    everything = _finite(train[1], held_out[1])
    if not len(everything):
        axes.set(xticks=[], yticks=[])
        axes.text(0.5, 0.5, "no finite loss to draw", transform=axes.transAxes, ha="center", color=_FAINT)
        return
    steps = np.concatenate([train[0], held_out[0]])
    late = steps.min() + (0.05 * (steps.max() - steps.min()) if len(train[0]) >= _SHORT else 0)
    settled = _finite(smooth[train[0] >= late], held_out[1][held_out[0] >= late], train[1][-1:])
    low, high = everything.min(), (settled if len(settled) else everything).max()
    high = min(everything.max(), high + 0.15 * (high - low))
    space = 0.05 * (high - low) or 0.05 * abs(high) or 0.05
    axes.set_ylim(low - space, high + space)
    if everything.max() > high + space:
        axes.plot([], [], " ", label=f"(the start, up to {everything.max():.4g}, is above the picture)")


def _finite(*parts: Numbers) -> Numbers:
    joined = np.concatenate(parts)
    return joined[np.isfinite(joined)]


def _label_ends(axes: Axes, lines: Sequence[tuple[Numbers, Numbers, str]]) -> None:
    """Write the last finite value of each line beside its end, apart enough to be read."""
    low, high = axes.get_ylim()
    ends = []
    for steps, values, color in lines:
        known = np.flatnonzero(np.isfinite(values))
        if len(known):
            ends.append((float(values[known[-1]]), float(steps[known[-1]]), color))
    height, gap = -math.inf, 0.05 * (high - low)
    for value, step, color in sorted(ends):
        height = max(value, height + gap)
        axes.annotate(
            f"{value:.4g}", (step, height), xytext=(8, 0), textcoords="offset points", va="center", color=color,
            fontweight="bold", annotation_clip=False,
        )  # fmt: skip


def _share(mask: NDArray[np.bool_]) -> str:
    return f"{mask.mean():.0%}" if mask.size else "nothing"


def _draw_masks(path: str | Path, masks: Mapping[str, tuple[NDArray[Any], str, str]]) -> None:
    """Each name with its shades from 0 to 1, a note, and what its rows and columns are of."""
    if not masks:
        raise ValueError("masks must hold at least 1 mask to draw, but is empty; give a name and a (T, S) array.")
    rows = math.ceil(len(masks) / 4)
    columns = math.ceil(len(masks) / rows)
    figure = Figure(figsize=(3.4 * columns, 3.8 * rows), dpi=150, layout=ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.1))
    for place, (name, (mask, note, of)) in enumerate(masks.items(), start=1):
        _draw_mask(figure.add_subplot(rows, columns, place), name, mask, note, of)
    _save(figure, path)


def _draw_mask(axes: Axes, name: str, mask: NDArray[Any], note: str, of: str) -> None:
    queries, keys = mask.shape
    _title(axes, name, width=28, pad=20)
    note = f"{note}, {queries} × {keys}"
    axes.annotate(note, (0, 1), xytext=(0, 6), xycoords="axes fraction", textcoords="offset points", color=_FAINT)
    axes.set_xlabel(f"{of}keys" if of else "key", color=_INK)
    axes.set_ylabel(f"{of}queries" if of else "query", color=_INK)
    if mask.size:
        axes.imshow(mask.astype(float), cmap=_SEEN, vmin=0, vmax=1)
        _frame_mask(axes, queries, keys)
    else:
        axes.set(xticks=[], yticks=[])


def _frame_mask(axes: Axes, queries: int, keys: int) -> None:
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=7, integer=True, min_n_ticks=1))
    axes.tick_params(colors=_INK, length=0, labelsize=8)
    axes.spines[:].set_visible(False)
    if max(queries, keys) <= 40:  # lines between the cells, while cells can be told apart
        axes.set_xticks(np.arange(keys + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(queries + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="white", linewidth=1)
        axes.tick_params(which="minor", length=0)


def _array(mask: Mask | Tiles) -> NDArray[Any]:
    return mask.detach().cpu().numpy() if isinstance(mask, Tensor) else mask


def _title(axes: Axes, title: str, *, width: int, pad: int) -> None:
    families = _families()
    shown = textwrap.fill(_drawable(title, families), width)
    axes.set_title(shown, loc="left", fontfamily=list(families), color=_INK, fontsize=12, pad=pad, parse_math=False)


@functools.cache
def _families() -> tuple[str, ...]:
    """The default font, then the first known CJK font that is installed: matplotlib asks them in this order."""
    installed = set(font_manager.get_font_names())
    return ("DejaVu Sans", *[name for name in _CJK_FAMILIES if name in installed][:1])


def _drawable(text: str, families: Sequence[str]) -> str:
    """`text` with every character that none of the fonts has as its escape, so that nothing is lost in boxes."""
    known: set[int] = {ord("\n")}
    for family in families:
        known.update(font_manager.get_font(font_manager.findfont(family)).get_charmap())
    return "".join(c if ord(c) in known else c.encode("unicode_escape").decode() for c in text)


def _save(figure: Figure, path: str | Path) -> None:
    FigureCanvasAgg(figure)
    with replacing(path) as file:
        figure.savefig(file, format="png")
