"""A record's schedule as small plots: what its function `schedule` gives for each step."""

import functools
import re
import sys
import types
from html import escape

from ledger.scripts import above, sections

# Title of a plot: the values of a schedule that it shows
PLOTS = {"learning rate, relative": ("lr_factor",), "Muon's momentum": ("momentum",),
         "attention window, tokens": ("window", "long_window", "short_window"),
         "sequence length, tokens": ("seq_len",), "tokens per step": ("tokens",)}
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 220, 120, 44, 22, 18
MOST_POINTS = 400


@functools.lru_cache(maxsize=4)  # a parent's is shown on its children's pages, too
def schedule_of(source: str) -> tuple | None:
    """(number of steps, {name: its value at each step}), or None where it cannot be had.

    The sections that make the schedule run by themselves, without torch.
    """
    parts = sections(above(source))
    imports = [line for line in parts.get("Imports", ())
               if line.startswith(("import ", "from ")) and "torch" not in line]
    in_blocks = re.findall(r"^    (\w+): int  # in blocks$", source, re.M)
    code = "\n".join([*imports, *parts.get("Hyperparameters", ()), *parts.get("Schedules", ())])
    module = types.ModuleType("schedule of a record")
    sys.modules[module.__name__] = module  # where dataclasses look their own up
    try:
        exec(compile(code, module.__name__, "exec"), vars(module))
        cfg = module.Hyperparameters()
        steps = [vars(module.schedule(step, cfg)) | {} for step in range(cfg.num_iterations)]
        for values in steps:
            values["tokens"] = cfg.sequences_per_step * values["seq_len"]
            for name in in_blocks:
                values[name] *= module.BLOCK
    except Exception:  # of any kind: a script of one's own may have other sections
        return None
    finally:
        del sys.modules[module.__name__]
    names = [name for shown in PLOTS.values() for name in shown if name in steps[0]]
    return len(steps), {name: [values[name] for values in steps] for name in names}


def points_of(values: list) -> list:
    """(step, value) where a line through them bends, first and last."""
    scale = max(map(abs, values)) or 1
    kept = [(step, value) for step, value in enumerate(values)
            if step in (0, len(values) - 1)
            or abs(values[step - 1] + values[step + 1] - 2 * value) > 1e-9 * scale]
    if len(kept) > MOST_POINTS:
        kept = [*kept[:: len(kept) // MOST_POINTS + 1], kept[-1]]
    return kept


def plot(title: str, curves: list, steps: int, low: float = 0, top: float = 0) -> str:
    """An SVG; `curves` are (class, points), and `steps` is where its axis ends."""
    top = top or max(value for _, points in curves for _, value in points) or 1

    def place(step, value):
        across = LEFT + step / steps * (WIDTH - LEFT - 6)
        down = HEIGHT - BOTTOM - (value - low) / (top - low) * (HEIGHT - TOP - BOTTOM)
        return f"{across:.1f},{down:.1f}"

    lines = []
    for kind, points in curves:
        shown = " ".join(place(*point) for point in points if point[1] <= top)
        lines.append(f'<polyline class="{kind}" points="{shown}"></polyline>')
    base = HEIGHT - BOTTOM
    highest = f"{top:,}" if isinstance(top, int) else f"{top:.4g}"
    return (f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'aria-label="{escape(title)} by step, up to {highest}">'
            f'<text x="4" y="12">{escape(title)}</text>'
            f'<text class="left" x="{LEFT - 4}" y="{TOP + 8}">{highest}</text>'
            f'<text class="left" x="{LEFT - 4}" y="{base}">{low:g}</text>'
            f'<text x="{LEFT}" y="{HEIGHT - 5}">0</text>'
            f'<text class="left" x="{WIDTH - 6}" y="{HEIGHT - 5}">{steps:,.0f} steps</text>'
            f'<path class="axis" d="M{LEFT} {TOP}V{base}H{WIDTH - 6}"></path>'
            f'{"".join(lines)}</svg>')


def losses_plot(ours: list, theirs: list, name: str | None, source: str) -> str:
    """HTML of published losses by step, and those of an earlier record of this name."""
    steps = max(step for step, _ in [*ours, *theirs])
    curves = [("theirs", theirs)] * bool(theirs) + [("ours", ours)]
    words = f" Those of {escape(name)} are dashed." if theirs else ""
    drawn = plot("validation loss", curves, steps, low=3.25, top=4.0)
    return (f'<h2 id="losses">Published losses</h2>\n<p>Of {source}.{words}</p>\n'
            f'<div class="plots large">{drawn}</div>\n')


def schedule_plots(source: str, parent: str | None) -> str:
    """HTML of a script's plots, with its parent's curves where they differ; or nothing."""
    found = schedule_of(source)
    before = schedule_of(parent) if parent else None
    if not found:
        return ""
    steps, ours = found
    their_steps, theirs = before or (0, {})
    plots, is_other = "", False
    for title, names in PLOTS.items():
        mine = [("ours", points_of(ours[name])) for name in names if name in ours]
        old = [("theirs", points_of(theirs[name])) for name in names if name in theirs]
        if not mine:
            continue
        differs = bool(old) and [values for _, values in old] != [values for _, values in mine]
        is_other |= differs
        curves = (old if differs else []) + mine
        plots += plot(title, curves, max(steps, their_steps if differs else 0))
    words = " The parent's are dashed where they differ." if is_other else ""
    return (f'<h2 id="schedule">The schedule</h2>\n<p>By step, as the script computes it.{words}'
            f'</p>\n<div class="plots">{plots}</div>\n')
