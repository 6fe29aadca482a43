"""The pictures of the races, and the published figures that they are drawn of."""

import csv
import re
from xml.etree import ElementTree

import pytest
from conftest import REPO
from website import chart

NAMESPACE = "{http://www.w3.org/2000/svg}"
RACES = {"race.svg": (chart.race_by_time, REPO / "records"),
         "race-steps.svg": (chart.race_by_steps, REPO / "records/optimizers")}


def rows_of(name):
    with (REPO / "records" / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def curves_of(rows, key, x, loss):
    curves = {}
    for row in rows:
        curves.setdefault(int(row[key]), []).append((row[x], float(row[loss])))
    return curves


def test_steps_and_seconds_of_each_record_ascend():
    rows = rows_of("public_curves.csv")
    assert len(rows) == 1266
    for column in "step", "train_time_s":
        curves = curves_of([row for row in rows if row[column]], "record", column, "val_loss")
        for number, curve in curves.items():
            values = [float(value) for value, _ in curve]
            assert values == sorted({*values}), f"#{number}"
    ends = curves_of(rows, "record", "step", "val_loss")
    assert len(ends) == 87
    for number, curve in ends.items():
        assert curve[-1][1] == pytest.approx(chart.TARGET, abs=0.008), f"#{number}"


def test_a_results_curve_passes_the_target_at_the_step_that_counts():
    """All 46 results; where the list and the log differ, the log's loss is near the target, too."""
    results = {int(row["result"]): row for row in rows_of("optimizers/public.csv")}
    curves = curves_of(rows_of("optimizers/public_curves.csv"), "result", "step", "mean_val_loss")
    assert {*results} == {*curves} == {*range(1, 47)}
    for number, curve in curves.items():
        steps = [int(step) for step, _ in curve]
        assert steps == sorted({*steps}), number
        claimed = int(results[number]["steps"])
        nearest = min(curve, key=lambda point: abs(int(point[0]) - claimed))
        assert nearest[1] == pytest.approx(chart.TARGET, abs=0.02), number
        assert float(results[number]["loss"]) < chart.TARGET, number


@pytest.mark.parametrize("name", RACES)
def test_a_race_is_drawn_of_its_figures_and_is_small(name):
    draw, folder = RACES[name]
    drawn = draw(folder)
    assert (REPO / "docs" / name).read_text() == drawn  # python records/website/chart.py
    assert len(drawn) < 100_000
    picture = ElementTree.fromstring(drawn)
    assert "prefers-color-scheme: dark" in drawn and picture.find(f"{NAMESPACE}title").text
    lines = [line.get("points") for line in picture.iter(f"{NAMESPACE}polyline")]
    width, height = (int(picture.get(side)) for side in ("width", "height"))
    for line in lines:
        for point in line.split():
            across, down = map(float, point.split(","))
            assert 0 <= across <= width and 0 <= down <= height, name
    assert len(lines) == (46 if name == "race-steps.svg" else 84)
    texts = [(float(text.get("x")), float(text.get("y")), text.text)
             for text in picture.iter(f"{NAMESPACE}text")]
    named = [text for text in texts if re.match(r"#?\d+ .*, [\d,]+ (s|steps)$", text[2])]
    assert len(named) == 8
    for left, down, words in named:  # no name lies on another
        for other_left, other_down, other in named:
            apart = abs(down - other_down) > 10 or not (
                left < other_left + 5 * len(other) and other_left < left + 5 * len(words))
            assert words == other or apart, (words, other)


def test_the_race_shows_all_but_the_records_that_its_note_names():
    shown = {int(row["record"]) for row in rows_of("public_curves.csv")
             if row["train_time_s"] and int(row["record"]) not in chart.ELSEWHERE}
    for number in {*range(1, 93)} - shown - {2}:  # of #1 to #3, the ends
        assert f"#{number}" in chart.NOTE
