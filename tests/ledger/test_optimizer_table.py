"""The table of optimizers is made of the runs of the scripts that are there."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import scipy
from fake_records import SCRIPT
from ledger.run import digest_of
from optimizers import table


def test_the_rank_correlation_is_scipys_and_its_interval_holds_the_true_one():
    """In 95 of 100 samples of twelve pairs, of a correlation that is known."""
    random = np.random.default_rng(0)
    true = 6 / math.pi * math.asin(0.7 / 2)  # of a normal distribution with correlation 0.7
    held = 0
    for _ in range(400):
        xs, ys = random.multivariate_normal([0, 0], [[1, 0.7], [0.7, 1]], 12).T
        rho, low, high = table.spearman(xs, ys)
        assert rho == pytest.approx(scipy.stats.spearmanr(xs, ys).statistic)
        held += low < true < high
    assert 0.92 < held / 400 < 0.98
    assert table.spearman([1, 2, 2, 3], [9, 8, 8, 1])[0] == pytest.approx(-1)  # with ties


def fake(result: int, steps: int):
    script = SCRIPT.replace("loss: float = 1.6", f"loss: float = {result}")
    return SimpleNamespace(name=f"o{result} A", ladder="steps", result=result, script=script,
                           published={"steps": steps})


def rows_of(record, rate: float, losses: dict) -> list:
    """A run for each seed, which falls straight from 3 to its loss in 100 steps."""
    return [{"script": digest_of(record.script), "flags": {"matrix_lr": f"{rate:g}"},
             "header": {"seed": str(seed)}, "val_loss": loss, "val": [[0, 3.0], [100, loss]]}
            for seed, loss in losses.items()]


def test_rows_are_of_the_best_rate_on_the_seeds_of_the_comparison():
    records = [fake(2, 5625), fake(12, 3325), fake(36, 3250), fake(44, 2750)]
    rows = []
    for record, loss in zip(records, (2.0, 1.7, 1.6, 1.5)):
        for rate in (0.1, 0.2, 0.4):
            rows += rows_of(record, rate, {1000: loss + rate, 1001: loss + rate})
        rows += rows_of(record, 0.1, {0: loss, 1: loss + 0.02})
    old = fake(99, 1)  # of a script that is no more
    found = table.measured(records, rows + rows_of(old, 0.1, {0: 1.0, 1: 1.0}))
    assert [record.result for record, _, _ in found] == [44, 36, 12, 2]
    text = table.text_of(found)
    assert "| o44 A | 0.1 | 3 | 1.5100 ± 0.0141 (2) |" in text
    assert table.target_of(found) == pytest.approx(1.62)
    steps = [138 / 1.5, 138 / 1.48]  # of the best, to 1.62
    assert f"| {np.mean(steps):.1f} ± " in text and "| 0 of 2 runs reach it | 5625 |" in text
    assert "ρ of loss and published steps: 1.00" in text and "n = 4" in text
