"""Draws docs/race.png: published validation losses against seconds of training.

The figures are those of the authors of modded-nanogpt's records. public_curves.csv has what their
logs print (github.com/KellerJordan/modded-nanogpt; each row names its file there, `logs` is the
number of logs behind a mean), public.toml the dates. None of it was measured here.
"""

import csv
import tomllib
from datetime import date
from pathlib import Path

RECORDS = Path(__file__).resolve().parents[1]
ELSEWHERE = (88,)  # whose linked log is of another machine
TARGET = 3.28
TICKS = (10, 20, 40, 80, 160, 320, 640, 1280)
LABELS = {  # the records that are named, in rows that take turns
    92: "#92 n-gram table", 81: "#81 MUDD", 53: "#53 three targets",
    19: "#19 FP8 head", 12: "#12 FlexAttention", 9: "#9 shortcuts", 5: "#5 ReLU², QK-norm",
    4: "#4 Muon"}
NOTE = ("From the public logs, one curve a record; dots are last validations. "
        "Some logs are longer runs, or of slower machines, than the listed record.\n"
        "Not drawn: #1 to #3 (no times), #88 (its log is of another machine), "
        "#66, #86, #90, #91 (no log). #92's log has its last loss alone.")


def read_curves(path: Path) -> dict:
    """Number of each record: its (step, loss, seconds) by step; seconds are None where missing."""
    curves = {}
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            seconds = float(row["train_time_s"]) if row["train_time_s"] else None
            point = int(row["step"]), float(row["val_loss"]), seconds
            curves.setdefault(int(row["record"]), []).append(point)
    return curves


def draw(path: Path, folder: Path = RECORDS) -> list:
    """Write the picture to a path; returns the numbers of the records that it shows."""
    import matplotlib
    from matplotlib.dates import date2num
    from matplotlib.figure import Figure

    rows = tomllib.loads((folder / "public.toml").read_text(encoding="utf-8"))["record"]
    days = {row["number"]: date2num(date.fromisoformat(row["date"])) for row in rows}
    colors = matplotlib.cm.ScalarMappable(
        matplotlib.colors.Normalize(min(days.values()), max(days.values())),
        matplotlib.colors.LinearSegmentedColormap.from_list(
            "race", ["#26336b", "#2f7fb8", "#35b3a0", "#f0a92e", "#d8352a"]))
    shown = []
    figure = Figure(figsize=(10, 5.8), layout="constrained")
    axis = figure.subplots()
    for number, curve in read_curves(folder / "public_curves.csv").items():
        points = [(seconds, loss) for _, loss, seconds in curve if seconds]
        if not points or number in ELSEWHERE:
            continue
        shown.append(number)
        color = colors.to_rgba(days[number])
        axis.plot(*zip(*points), color=color, linewidth=1.6 if number in LABELS else 0.7)
        axis.plot(*points[-1], "o", color=color, markersize=6 if number in LABELS else 2.5)
        if number in LABELS:
            below = -16 if [*LABELS].index(number) % 2 else -46
            axis.annotate(f"{LABELS[number]}\n{points[-1][0]:,.0f} s", points[-1], (0, below),
                          textcoords="offset points", ha="center", va="top", fontsize=8,
                          arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.8})
    axis.axhline(TARGET, color="#1c2126", linewidth=0.8, linestyle=(0, (6, 4)), zorder=0)
    axis.text(7.2, TARGET + 0.01, "target: 3.28", va="bottom", fontsize=8)
    axis.set(xscale="log", xlim=(7, 1900), ylim=(2.93, 4.6),
             xlabel="seconds of training on 8×H100", ylabel="validation loss")
    axis.set_title("The race: published runs to a validation loss of 3.28", loc="left")
    axis.set_yticks([3.2, 3.4, 3.6, 3.8, 4.0, 4.2, 4.4, 4.6])
    axis.set_xticks(TICKS, [f"{tick:,}" for tick in TICKS])
    axis.minorticks_off()
    axis.grid(color="#e3e6e9", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    bar = figure.colorbar(colors, ax=axis, shrink=0.6, aspect=30, pad=0.01)
    bar.outline.set_visible(False)
    years = [date2num(date(year, month, 1)) for year in (2024, 2025, 2026) for month in (1, 7)]
    years = [day for day in years if min(days.values()) <= day <= max(days.values())]
    bar.set_ticks(years)
    bar.ax.yaxis.set_major_formatter(matplotlib.dates.DateFormatter("%b %Y"))
    figure.supxlabel(NOTE, fontsize=7, color="#5c6670", x=0.01, ha="left")
    figure.savefig(path, dpi=150, metadata={"Software": None})  # equal files again
    return shown


if __name__ == "__main__":
    draw(RECORDS.parent / "docs/race.png")
