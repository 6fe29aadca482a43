"""The picture of the race, and the published figures that it is drawn of."""

import matplotlib.image
import pytest
from conftest import REPO
from website import race


@pytest.fixture(scope="module")
def curves():
    return race.read_curves(REPO / "records/public_curves.csv")


def test_steps_and_seconds_of_each_record_ascend(curves):
    assert len(curves) == 87 and sum(map(len, curves.values())) == 1266
    for number, curve in curves.items():
        steps = [step for step, _, _ in curve]
        seconds = [time for _, _, time in curve if time is not None]
        assert steps == sorted(set(steps)), f"#{number}"
        assert seconds == sorted(set(seconds)), f"#{number}"
        assert len(seconds) in (0, len(curve)), f"#{number}"


def test_each_record_ends_near_the_target(curves):
    for number, curve in curves.items():
        assert curve[-1][1] == pytest.approx(race.TARGET, abs=0.008), f"#{number}"


def test_the_picture_shows_all_but_the_records_that_it_names(tmp_path, curves):
    shown = race.draw(tmp_path / "race.png")
    assert set(curves) - set(shown) == {1, 2, 88}
    for number in {*range(1, 93)} - set(shown) - {2}:  # of #1 to #3, the ends
        assert f"#{number}" in race.NOTE
    pixels = matplotlib.image.imread(tmp_path / "race.png")
    assert pixels.shape[1] == 1500 and pixels[..., :3].std() > 0.02
