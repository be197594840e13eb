"""Pictures: files are PNGs with something drawn on them, odd data and odd titles included."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import image
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from anyformer.inspect import plot
from anyformer.inspect.plot import plot_loss, plot_mask, plot_tiles, text_mask, text_tiles

CAUSAL = np.tril(np.ones((4, 4), dtype=bool))
BLUE, RED = (0x1F, 0x5F, 0xA8), (0xD1, 0x49, 0x5B)


def pixels(path: Path) -> np.ndarray:
    """(height, width, 3) in 0..255, after a look at the file's signature."""
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    return np.rint(image.imread(path)[..., :3] * 255).astype(int)


def share(picture: np.ndarray, color: tuple[int, int, int]) -> float:
    return float((np.abs(picture - color).max(axis=-1) <= 2).mean())


def drawn_axes(monkeypatch: pytest.MonkeyPatch) -> list[Axes]:
    """The axes of every figure drawn from now on."""
    seen: list[Axes] = []
    original = Figure.savefig

    def spy(self: Figure, *args: Any, **options: Any) -> None:
        seen.extend(self.axes)
        original(self, *args, **options)

    monkeypatch.setattr(Figure, "savefig", spy)
    return seen


def long_run() -> dict[str, list[float]]:
    steps = np.arange(1000.0)
    noise = np.random.default_rng(0).normal(0, 0.05, 1000)
    loss = 1.5 + 9 * np.exp(-steps / 15) + noise
    return {
        "steps": steps.tolist(),
        "train_loss": loss.tolist(),
        "eval_steps": [250.0, 500.0, 750.0, 999.0],
        "eval_loss": [1.75, 1.65, 1.6, 1.62],
    }


def test_loss_picture_shows_both_lines(tmp_path: Path) -> None:
    plot_loss(tmp_path / "loss.png", **long_run(), title="run")
    picture = pixels(tmp_path / "loss.png")
    assert picture.shape == (750, 1350, 3)
    assert share(picture, (255, 255, 255)) > 0.5
    assert share(picture, BLUE) > 0.002
    assert share(picture, RED) > 0.001


def test_loss_without_held_out_draws_none(tmp_path: Path) -> None:
    plot_loss(tmp_path / "loss.png", [1, 2, 3], [3.0, 2.0, 1.5], [], [], title="run")
    assert share(pixels(tmp_path / "loss.png"), RED) == 0


def test_loss_names_units_best_and_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = drawn_axes(monkeypatch)
    plot_loss(tmp_path / "loss.png", **long_run(), title="run")
    assert axes[0].get_xlabel() == "optimizer step"
    assert axes[0].get_ylabel() == "loss (nats per token)"
    assert axes[0].get_title("left") == "run"
    legend = [text.get_text() for text in axes[0].get_legend().get_texts()]
    assert legend[:2] == ["training", "held out (best 1.6 at step 750)"]
    assert "1.62" in [text.get_text() for text in axes[0].texts]


def test_height_fits_what_comes_after_the_fall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = drawn_axes(monkeypatch)
    run = long_run()
    plot_loss(tmp_path / "loss.png", **run, title="run")
    low, high = axes[0].get_ylim()
    assert low < min(run["train_loss"])
    assert max(run["eval_loss"]) < high < 3.5
    assert "(the start, up to 10." in axes[0].get_legend().get_texts()[-1].get_text()


def test_divergence_at_the_end_stays_in_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = drawn_axes(monkeypatch)
    run = long_run()
    run["train_loss"][-1] = 30.0
    plot_loss(tmp_path / "loss.png", **run, title="run")
    assert axes[0].get_ylim()[1] > 30


def test_short_run_is_shown_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = drawn_axes(monkeypatch)
    plot_loss(tmp_path / "loss.png", [1, 2, 3], [9.0, 2.0, 1.0], [3], [1.1], title="run")
    low, high = axes[0].get_ylim()
    assert low < 1
    assert high > 9


def test_running_mean_neither_lags_nor_smears_the_start() -> None:
    line = np.linspace(10, 0, 400)
    np.testing.assert_allclose(plot._running_mean(line)[:380], line[:380])
    flat = np.array([1.0, np.nan, 1.0] + [1.0] * 77)
    np.testing.assert_equal(plot._running_mean(flat), flat)


@pytest.mark.parametrize(
    ("steps", "losses"),
    [([], []), ([1.0], [2.0]), ([1.0, 2.0], [math.nan, math.inf]), ([1.0, 2.0, 3.0], [2.0, math.nan, 1.0])],
)
def test_odd_losses_are_drawn_without_a_warning(tmp_path: Path, steps: list[float], losses: list[float]) -> None:
    plot_loss(tmp_path / "loss.png", steps, losses, steps, losses, title="odd")
    assert pixels(tmp_path / "loss.png").std() > 0


def test_unpaired_losses_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"eval_loss must have one value per step \(2\), but has 1\."):
        plot_loss(tmp_path / "loss.png", [1], [2.0], [1, 2], [2.0], title="run")
    assert list(tmp_path.iterdir()) == []


def test_title_takes_chinese_and_dollars_without_a_warning(tmp_path: Path) -> None:
    # Warnings are errors here: a glyph that no font has would be one, and "$x^$" read as a formula would be an error.
    plot_loss(tmp_path / "loss.png", [1, 2], [2.0, 1.0], [], [], title="训练损失 $x^$ 😀")
    plot_mask(tmp_path / "mask.png", {"滑动窗口": CAUSAL})


def test_unknown_characters_become_escapes() -> None:
    assert plot._drawable("a训é", ("DejaVu Sans",)) == "a\\u8badé"


def test_installed_cjk_font_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot.font_manager, "get_font_names", lambda: ["SimHei", "DejaVu Sans", "Noto Sans CJK SC"])
    assert plot._families.__wrapped__() == ("DejaVu Sans", "Noto Sans CJK SC")
    monkeypatch.setattr(plot.font_manager, "get_font_names", lambda: ["DejaVu Sans"])
    assert plot._families.__wrapped__() == ("DejaVu Sans",)


def test_mask_picture_has_dark_for_seen(tmp_path: Path) -> None:
    plot_mask(tmp_path / "full.png", {"full": np.ones((6, 6), dtype=bool)})
    plot_mask(tmp_path / "none.png", {"none": np.zeros((6, 6), dtype=bool)})
    assert share(pixels(tmp_path / "full.png"), BLUE) > 0.4
    assert share(pixels(tmp_path / "none.png"), BLUE) == 0


def test_mask_picture_has_queries_down_and_keys_across(tmp_path: Path) -> None:
    mask = np.zeros((2, 2), dtype=bool)
    mask[0, 1] = True  # query 0 sees key 1: top right
    plot_mask(tmp_path / "mask.png", {"mask": mask})
    dark = np.abs(pixels(tmp_path / "mask.png") - BLUE).max(axis=-1) <= 2
    rows, columns = np.nonzero(dark)
    light = np.argwhere(np.abs(pixels(tmp_path / "mask.png") - (0xEE, 0xF1, 0xF5)).max(axis=-1) <= 2)
    assert rows.mean() < light[:, 0].mean()
    assert columns.mean() > light[:, 1].mean()


def test_masks_stand_side_by_side(tmp_path: Path) -> None:
    masks = {f"m{i}": torch.from_numpy(CAUSAL) for i in range(5)}
    plot_mask(tmp_path / "one.png", {"m0": CAUSAL})
    plot_mask(tmp_path / "five.png", {**masks, "cross": torch.ones(3, 7, dtype=torch.bool)})
    one, six = pixels(tmp_path / "one.png").shape, pixels(tmp_path / "five.png").shape
    assert (six[0], six[1]) == (2 * one[0], 3 * one[1])


def test_mask_of_no_queries_is_drawn(tmp_path: Path) -> None:
    plot_mask(tmp_path / "mask.png", {"empty": np.zeros((0, 4), dtype=bool)})
    assert text_mask(np.zeros((0, 4), dtype=bool)) == ""


def test_no_masks_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 1 mask to draw, but is empty"):
        plot_mask(tmp_path / "mask.png", {})


def test_tiles_have_three_shades(tmp_path: Path) -> None:
    tiles = np.array([[0, 1], [2, 2]])
    plot_tiles(tmp_path / "tiles.png", {"tiles": tiles})
    middle = (np.array((0xEE, 0xF1, 0xF5)) + np.array(BLUE)) / 2
    areas = [(np.abs(pixels(tmp_path / "tiles.png") - shade).max(axis=-1) <= 2).sum() for shade in (middle, BLUE)]
    assert areas[0] > 1000
    assert areas[1] == pytest.approx(2 * areas[0], rel=0.1)
    assert text_tiles(tiles) == "·▒\n██"
    assert text_tiles(torch.from_numpy(tiles)) == "·▒\n██"


def test_text_mask() -> None:
    assert text_mask(np.array([[True, False, False], [True, True, False]])) == "█··\n██·"
    assert text_mask(torch.from_numpy(CAUSAL)) == "█···\n██··\n███·\n████"


def test_pyplot_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it is now an error
    plot_loss(tmp_path / "loss.png", [1], [2.0], [], [], title="run")
    plot_mask(tmp_path / "mask.png", {"causal": CAUSAL})
