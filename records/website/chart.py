"""Charts as SVG in the page's colours: the races, and the ladder whose points are links.

    python records/website/chart.py

draws docs/race.svg and docs/race-steps.svg anew. Their figures are published ones, from
public_curves.csv and public.toml of records/, and those of records/optimizers/. None of it was
measured here.
"""

import csv
import math
import sys
import tomllib
from datetime import date
from html import escape
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
TARGET = 3.28
LETTER = 5.7  # width of a letter in a picture, about, in pixels
ELSEWHERE = (88,)  # whose linked log is of another machine
RACE = {  # public records that the race names
    92: "#92 n-gram table", 81: "#81 MUDD", 53: "#53 three targets", 19: "#19 FP8 head",
    12: "#12 FlexAttention", 9: "#9 shortcuts", 5: "#5 ReLU², QK-norm", 4: "#4 Muon"}
STEPS = {  # results that the other race names
    46: "46 floor of rows", 30: "30 Aurora", 20: "20 Soft-Muon", 11: "11 Contra-Muon",
    3: "3 Muon", 2: "2 AdamW", 4: "4 AdamH", 22: "22 no momentum"}
NOTE = ("From the public logs, one curve a record; dots are last validations. Some logs are longer "
        "runs, or of slower machines, than the listed record. Not drawn: #1 to #3 (no times), #88 "
        "(its log is of another machine), #66, #86, #90, #91 (no log). #92's log has its last loss "
        "alone.")
# Colours of both schemes: a picture on its own, as a page of GitHub has it, knows no style sheet.
STYLE = """<style>
.chart-svg { color: #1c2126; fill: currentColor; font: 11px sans-serif; }
@media (prefers-color-scheme: dark) { .chart-svg { color: #dde2e6; } }
.chart-svg path, .chart-svg polyline { fill: none; stroke: currentColor; }
.chart-svg .grid { opacity: .18; } .chart-svg .target { stroke-dasharray: 6 4; }
.chart-svg .x { text-anchor: middle; } .chart-svg .y { text-anchor: end; }
</style>"""


class Chart:
    """A picture with two axes. `x` and `y` are (lowest, highest, whether by logarithm)."""

    def __init__(self, width: int, height: int, x: tuple, y: tuple):
        self.width, self.height, self.x, self.y = width, height, x, y
        self.left, self.right, self.top, self.bottom = 44, width - 12, 14, height - 40
        self.parts, self.taken = [], []

    def place(self, x: float, y: float) -> tuple:
        """The pixels of a point."""
        across, up = (self.share(value, axis) for value, axis in ((x, self.x), (y, self.y)))
        return (round(self.left + across * (self.right - self.left), 1),
                round(self.bottom - up * (self.bottom - self.top), 1))

    @staticmethod
    def share(value: float, axis: tuple) -> float:
        low, high, is_log = axis
        if is_log:
            value, low, high = map(math.log, (value, low, high))
        return (value - low) / (high - low)

    def axes(self, x_ticks: dict, y_ticks: dict, x_words: str, y_words: str):
        """Lines of the grid; ticks are {value: words}."""
        for value, words in x_ticks.items():
            across, _ = self.place(value, self.y[0])
            self.parts.append(f'<path class="grid" d="M{across} {self.top}V{self.bottom}"></path>'
                              f'<text class="x" x="{across}" y="{self.bottom + 14}">{words}</text>')
        for value, words in y_ticks.items():
            _, down = self.place(self.x[0], value)
            self.parts.append(f'<path class="grid" d="M{self.left} {down}H{self.right}"></path>'
                              f'<text class="y" x="{self.left - 5}" y="{down + 4}">{words}</text>')
        middle = (self.left + self.right) / 2
        self.parts.append(f'<text class="x" x="{middle}" y="{self.height - 6}">{x_words}</text>'
                          f'<text x="{self.left + 4}" y="{self.top + 4}">{y_words}</text>')

    def line(self, points: list, color: str, width: float):
        """A line through the points that are in sight."""
        shown = " ".join("{},{}".format(*self.place(*point)) for point in points
                         if self.y[0] <= point[1] <= self.y[1])
        self.parts.append(f'<polyline points="{shown}" style="stroke:{color};'
                          f'stroke-width:{width}"></polyline>')

    def has_room(self, left: float, top: float, words: str) -> bool:
        """Whether words fit beside all that are there; then their place is taken."""
        box = left, top, left + LETTER * len(words), top + 12
        if box[2] > self.width or any(box[0] < other[2] and other[0] < box[2] and box[1] < other[3]
                                      and other[1] < box[3] for other in self.taken):
            return False
        self.taken.append(box)
        return True

    def svg(self, title: str) -> str:
        return (f'<svg xmlns="http://www.w3.org/2000/svg" class="chart-svg" '
                f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
                f'height="{self.height}">{STYLE}<title>{escape(title)}</title>'
                f'{"".join(self.parts)}</svg>\n')


def hue(share: float) -> str:
    """A colour between blue, for 0, and red, for 1."""
    return f"hsl({230 * (1 - share):.0f} 70% 47%)"


# ---- The races ----
def read_curves(path: Path, key: str, x: str) -> dict:
    """{number: [(x, loss), ...]} by ascending x; points without x are left out."""
    curves = {}
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            loss = row.get("val_loss") or row.get("mean_val_loss")
            curves.setdefault(int(row[key]), []).append(
                (float(row[x]) if row[x] else None, float(loss)))
    return curves


def race_svg(curves: dict, days: dict, labels: dict, chart: Chart, title: str, unit: str) -> str:
    """Curves from blue to red by date; the ends of some have names, where there is room."""
    _, target = chart.place(chart.x[0], TARGET)
    chart.parts.append(f'<path class="target" d="M{chart.left} {target}H{chart.right}"></path>'
                       f'<text x="{chart.left + 4}" y="{target - 4}">target: 3.28</text>')
    first, last = min(days.values()), max(days.values())
    for number, points in sorted(curves.items(), key=lambda item: days[item[0]]):
        color = hue((days[number] - first) / max(last - first, 1))
        chart.line(points, color, 2 if number in labels else 0.8)
        across, down = chart.place(*points[-1])
        chart.parts.append(f'<circle cx="{across}" cy="{down}" r="{4 if number in labels else 2}" '
                           f'style="fill:{color}"></circle>')
    for number, words in labels.items():
        if number not in curves:
            continue
        across, down = chart.place(*curves[number][-1])
        words = f"{words}, {curves[number][-1][0]:,.0f} {unit}"
        start = min(max(across - LETTER * len(words) / 2, chart.left), chart.right
                    - LETTER * len(words))
        for below in range(26, 140, 15):
            if down + below < chart.bottom and chart.has_room(start, down + below - 10, words):
                chart.parts.append(f'<path class="grid" d="M{across} {down + 5}V{down + below - 11}'
                                   f'"></path><text x="{start:.0f}" y="{down + below}">'
                                   f"{words}</text>")
                break
    for place in range(24):  # what the colours mean
        chart.parts.append(f'<rect x="{chart.right - 200 + 4 * place}" y="{chart.top}" width="4" '
                           f'height="8" style="fill:{hue(place / 23)}"></rect>')
    for kind, place, day in ("y", chart.right - 204, first), ("end", chart.right - 100, last):
        chart.parts.append(f'<text class="{kind}" x="{place}" y="{chart.top + 8}">'
                           f'{date.fromordinal(day).strftime("%b %Y")}</text>')
    return chart.svg(title)


def race_by_time(folder: Path) -> str:
    """The race of the first ladder: published loss against seconds."""
    rows = tomllib.loads((folder / "public.toml").read_text(encoding="utf-8"))["record"]
    days = {row["number"]: date.fromisoformat(row["date"]).toordinal() for row in rows}
    curves = {number: [point for point in curve if point[0]] for number, curve in
              read_curves(folder / "public_curves.csv", "record", "train_time_s").items()
              if number not in ELSEWHERE}
    chart = Chart(880, 500, (7, 1900, True), (2.9, 4.6, False))
    chart.axes({tick: f"{tick:,}" for tick in (10, 20, 40, 80, 160, 320, 640, 1280)},
               {tick / 10: f"{tick / 10}" for tick in range(30, 48, 2)},
               "seconds of training on 8×H100", "validation loss, nats a token")
    return race_svg({number: curve for number, curve in curves.items() if curve}, days, RACE, chart,
                    "Published validation loss against seconds, a curve for each record", "s")


def race_by_steps(folder: Path) -> str:
    """The race of the second ladder: published loss against steps, up to the step that counts."""
    with (folder / "public.csv").open(encoding="utf-8") as file:
        rows = {int(row["result"]): row for row in csv.DictReader(file)}
    days = {number: date.fromisoformat(row["date"]).toordinal() for number, row in rows.items()}
    curves = {number: [(step, loss) for step, loss in curve
                       if 500 <= step <= int(rows[number]["steps"])] for number, curve in
              read_curves(folder / "public_curves.csv", "result", "step").items()}
    chart = Chart(880, 500, (500, 9000, True), (3.0, 4.2, False))
    chart.axes({tick: f"{tick:,}" for tick in (500, 1000, 2000, 3000, 4000, 6000, 8000)},
               {tick / 10: f"{tick / 10}" for tick in range(30, 43, 2)},
               "optimizer steps", "validation loss, nats a token")
    return race_svg(curves, days, STEPS, chart,
                    "Published validation loss against steps, a curve for each result", "steps")


# ---- The ladder ----
def ladder_svg(points: list, named: dict) -> str:
    """Minutes by date, as links in the order of time.

    `points` are (day, minutes, address, words, whether its script is here); `named` has the names
    of addresses, which stand where there is room, the first one first.
    """
    days = [day for day, *_ in points]
    chart = Chart(880, 480, (min(days) - 20, max(days) + 190, False), (0.6, 50, True))
    ticks = [date(year, month, 1) for year in range(2024, 2028) for month in (1, 7)]
    chart.axes({tick.toordinal(): tick.strftime("%b %Y") for tick in ticks
                if min(days) <= tick.toordinal() <= max(days)},
               {tick: f"{tick:g}" for tick in (0.7, 1, 1.5, 2, 3, 5, 10, 20, 40)},
               "date of the public record", "published minutes on 8×H100")
    for day, minutes, address, words, is_here in sorted(points):
        across, down = chart.place(day, minutes)
        kind, radius = ("ours", 4) if is_here else ("theirs", 2.5)
        chart.parts.append(f'<a href="{address}" tabindex="-1"><title>{escape(words)}</title>'
                           f'<circle class="{kind}" cx="{across}" cy="{down}" r="{radius}">'
                           "</circle></a>")
    places = {address: chart.place(day, minutes) for day, minutes, address, *_ in points}
    for address, label in named.items():
        across, down = places[address]
        if chart.has_room(across + 5, down - 14, label):
            chart.parts.append(f'<text x="{across + 5}" y="{down - 4}">{escape(label)}</text>')
    return chart.svg("Published minutes of the public records by date")


def main():
    for name, draw, folder in (("race.svg", race_by_time, REPO / "records"),
                               ("race-steps.svg", race_by_steps, REPO / "records/optimizers")):
        if not (folder / "public_curves.csv").exists():
            sys.exit(f"{folder / 'public_curves.csv'} is not there; it has the published losses")
        (REPO / "docs" / name).write_text(draw(folder), encoding="utf-8")
        print(f"wrote docs/{name}")


if __name__ == "__main__":
    main()
