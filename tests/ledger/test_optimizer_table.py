"""The table of optimizers is made of the runs of the scripts that are there."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
import scipy
from fake_records import SCRIPT
from ledger.records import find_records
from ledger.run import digest_of, read_store
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
    folder = Path(f"2026-{result // 20 + 5:02}-{result % 20 + 1:02}_o{result}_A")
    return SimpleNamespace(name=f"o{result} A", ladder="steps", result=result, script=script,
                           folder=folder, published={"steps": steps})


def rows_of(record, rate: float, losses: dict) -> list:
    """A run for each seed, which falls straight from 3 to its loss in 100 steps."""
    header = {"device": "a CPU", "torch": "2", "process_time_ms": "36000"}
    return [{"script": digest_of(record.script), "flags": {"matrix_lr": f"{rate:g}"},
             "header": header | {"seed": str(seed)}, "val_loss": loss, "train_time_ms": 36000,
             "val": [[0, 3.0], [100, loss]]} for seed, loss in losses.items()]


RECORDS = [fake(2, 5625), fake(12, 3325), fake(20, 3030), fake(30, 2750), fake(36, 3250)]


def store() -> list:
    """Each was tried at three rates, of which the least is the best; o36 ends at 1.6."""
    rows = []
    for record, loss in zip(RECORDS, (2.0, 1.7, 1.5, 1.4, 1.6)):
        for rate in (0.1, 0.2, 0.4):
            rows += rows_of(record, rate, {1000: loss + rate, 1001: loss + rate})
            # Where another rate has more seeds, or better ones, tuning still decides.
            more = dict.fromkeys(range(3), 1.0) if rate == 0.2 else {}
            rows += rows_of(record, rate, more)
        gap = record.result / 1000
        rows += rows_of(record, 0.1, {0: loss, 1: loss + 0.02 + gap})
    return rows


def test_rows_are_of_the_best_rate_on_the_seeds_of_the_comparison():
    old = fake(31, 1)  # of a script that is no more
    rows = store() + rows_of(old, 0.1, {0: 1.0, 1: 1.0})
    step = fake(29, 2990)
    step.result = None  # a step to a result, not one of the public ones
    rows += rows_of(step, 0.1, {0: 1.0, 1: 1.0, 1000: 1.0})
    entries = table.read_entries([*RECORDS, step], rows)
    assert [entry.record.result for entry in entries] == [30, 20, 36, 12, 2]
    assert [len(entry.tried) for entry in entries] == [3] * 5
    assert entries[0].losses == [1.4, 1.45]
    assert table.target_of(entries) == pytest.approx(1.656)


def test_the_table_compares_in_pairs_of_a_seed_and_counts_steps():
    rows = store()
    entries = table.read_entries(RECORDS, rows)
    text = table.text_of(entries)
    assert "_o30_A) | 0.1 | 1.4250 ± 0.0354 (2) | −0.2030 ± 0.0030* |" in text
    assert "_o36_A) | 0.1 | 1.6280 ± 0.0396 (2) |  |" in text
    assert "Steps to 1.6560" in text and "tried at 3 rates" in text
    assert "| 0 of 2 runs reach it | 5,625 |" in text
    compared, tuning = 2 * 5, 2 * 3 * 5
    assert f"{compared + tuning} runs of 36 s" in text
    assert f"{(compared + tuning) / 100:.1f} hours" in text
    found = scipy.stats.spearmanr([1.425, 1.52, 1.62, 1.71, 2.01], [2750, 3030, 3250, 3325, 5625])
    assert found.statistic == pytest.approx(1)
    assert "| all results | 5 | 1.00 (nan to nan) |" in text
    assert "2 results with fewer published steps than o36, 2 end below" in text
    assert "2 with more, 2 end above" in text.replace("\n", " ")


def test_a_run_that_diverged_is_worse_than_all():
    rows = store()
    rows += rows_of(RECORDS[0], 0.05, {1000: None, 1001: 1.0})
    entries = table.read_entries(RECORDS, rows)
    assert (entries[-1].rate, len(entries[-1].tried)) == ("0.1", 4)


def test_results_run_at_the_lowest_point_between_the_rates_that_were_tried():
    """Sizes were run at the best of those that were tried."""
    rows = []
    for record in RECORDS:
        for rate, loss in ((0.1, 1.5), (0.2, 1.3), (0.4, 1.4)):
            rows += rows_of(record, rate, {1000: loss, 1001: loss, 0: 1.0, 1: 1.0})
    assert not table.read_entries(RECORDS, rows)  # none ran there
    vertex = 0.2 * 2 ** np.roots(np.polyder(np.polyfit([-1, 0, 1], [1.5, 1.3, 1.4], 2)))[0]
    rows += [row for record in RECORDS for row in rows_of(record, float(f"{vertex:.3g}"),
                                                          {0: 1.28, 1: 1.29})]
    entries = table.read_entries(RECORDS, rows)
    assert [entry.losses for entry in entries] == 5 * [[1.28, 1.29]]
    size = rows_of(RECORDS[0], 0.2, {0: 1.1})
    assert list(table.runs_by_size(entries, size)) == ["the pocket's"]
    assert not table.runs_by_size(entries, rows_of(RECORDS[0], 0.1, {0: 1.1}))
    size[0]["flags"] = {"model_dim": "32"}  # its rate is the script's own
    assert not table.runs_by_size(entries, size)


def test_other_sizes_are_those_at_which_all_ran_at_their_best_rates():
    entries = table.read_entries(RECORDS, store())
    assert table.sizes_text(entries, []) == ""
    rows, losses = [], {2: 2.2, 12: 1.5, 20: 1.6, 30: 1.4, 36: 1.7}
    for record in RECORDS:
        rows += rows_of(record, 0.1, {0: losses[record.result], 1000: 1.0})
        rows += rows_of(record, 0.2, {0: 1.0})  # not its best rate
    rows += rows_of(RECORDS[-1], 0.1, {1: 1.8})
    for row in rows:
        row["flags"] |= {"model_dim": "32", "cooldown_frac": "1", "val_every": "5"}
    few = rows_of(RECORDS[0], 0.1, {0: 1.0})  # only one ran at this size
    few[0]["flags"]["model_dim"] = "16"
    text, legend = table.sizes_text(entries, few + rows).split("\n\n")
    losses = [1.4, 1.6, 1.7, 1.5, 2.2]  # in the order of the entries
    between, within = np.std(losses, ddof=1), np.std([1.7, 1.8], ddof=1)
    rho = scipy.stats.spearmanr(losses, [2750, 3030, 3250, 3325, 5625]).statistic
    with_table = scipy.stats.spearmanr(losses, [1, 2, 3, 4, 5]).statistic
    assert "on a CPU" in legend.replace("\n", " ")
    (row,) = text.splitlines()[2:]
    assert row.startswith(f"| width 32, cooldown_frac 1 | 36 | {between:.4f} | {within:.4f} | "
                          f"{between / within:.1f} | {rho:.2f} (")
    assert row.endswith(f"| {with_table:.2f} |")


def test_the_plot_has_a_dot_and_a_name_for_each():
    entries = table.read_entries(RECORDS, store())
    drawn = ElementTree.fromstring(table.scatter(entries))
    name = "{http://www.w3.org/2000/svg}"
    dots = {(float(dot.get("cx")), float(dot.get("cy"))) for dot in drawn.iter(f"{name}circle")}
    assert len(dots) == 5
    left, right = min(dots), max(dots)
    assert left[1] > right[1]  # o30 has fewer steps, and the lower loss
    words = {text.text for text in drawn.iter(f"{name}text")}
    assert {record.name for record in RECORDS} <= words


def test_the_page_has_the_table_of_the_store():
    """Mend by `python records/optimizers/table.py --write`."""
    rows, sizes = (list(read_store(table.FOLDER / name).values())
                   for name in ("runs.jsonl", "sizes.jsonl"))
    entries = table.read_entries(find_records(table.FOLDER.parent), rows)
    page = (table.FOLDER / "README.md").read_text()
    parts = {"laptop": table.text_of(entries), "sizes": table.sizes_text(entries, sizes)}
    for name, part in parts.items():
        assert f"<!-- ledger: begin {name} -->\n{part}\n<!-- ledger: end -->" in page
    assert table.PICTURE.read_text() == table.scatter(entries)


def two_machines() -> str:
    rows = store()
    rows[-1]["header"] = rows[-1]["header"] | {"device": "another CPU"}
    return "".join(json.dumps(row | {"run": str(place)}) + "\n" for place, row in enumerate(rows))


@pytest.mark.parametrize("content, words", [
    (None, "is not there"), ("", "0 of these results"), (two_machines(), "of several machines")])
def test_a_store_that_cannot_be_used(tmp_path, monkeypatch, content, words):
    path = tmp_path / "runs.jsonl"
    if content is not None:
        path.write_text(content)
    monkeypatch.setattr(table, "find_records", lambda folder: RECORDS)
    monkeypatch.setattr("sys.argv", ["table.py", str(path)])
    with pytest.raises(SystemExit, match=f"runs.jsonl .*{words}"):
        table.main()
