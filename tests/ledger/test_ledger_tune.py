"""Scripts are tuned with as many tries, and compared on other seeds; what ran is kept in a file."""

import json
import re
import runpy
import subprocess
import sys

import numpy as np
import pytest
import scipy
from fake_records import SCRIPT, edit
from ledger import run, tune
from ledger.__main__ import main

BEST = 0.2  # of every rate


def bowl(*rates) -> str:
    """A script whose loss grows with the distance of its rates from their best."""
    lines = [f"    value += 0.1 * math.log2(cfg.{rate} / {BEST}) ** 2\n" for rate in rates]
    settings = [f"    {rate}: float = 0.1\n" for rate in rates]
    return (SCRIPT.replace("import random\n", "import math\nimport random\n")
            .replace("    muon_lr: float = 0.05  # of no effect\n", "".join(settings))
            .replace("    own = random", "".join(lines) + "    own = random"))


DIVERGES = """
    if cfg.muon_lr > 0.3:
        lines += ["step:1/40 train_loss:5.1 train_time:9ms", ""]
        (folder / "log.txt").write_text("\\n".join(lines))
        sys.exit("error: step:2/40 train_loss:nan; lower the learning rates")
    ms = 0
"""


def rows_of(store):
    return [json.loads(line) for line in store.read_text().splitlines()]


def ledger(*words) -> int:
    return main(["run", *map(str, words)])


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A script whose runs take no process of their own, which would take a second each."""
    def run_here(command, cwd, **_):
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "argv", command[1:])
        try:
            runpy.run_path(command[1], run_name="__main__")
            words, status = "", 0
        except SystemExit as error:
            words, status = error.code, 1
        monkeypatch.chdir(tmp_path)
        return subprocess.CompletedProcess(command, status, stdout=words)

    monkeypatch.setattr(run.subprocess, "run", run_here)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "a.py").write_text(bowl("muon_lr"))
    return tmp_path / "a.py"


def test_a_rate_far_from_its_best_is_found_with_as_many_tries_for_all(script, tmp_path, capsys):
    words = ["a.py", f"a.py:muon_lr={BEST / 4}", "--tune", "muon_lr", "--values", 3, "--seeds", 3,
             "--out", "out"]
    edit(script, "muon_lr: float = 0.1", f"muon_lr: float = {BEST}")
    assert ledger(*words) == 0
    out, err = capsys.readouterr()
    tuned, _, compared = out.split("\n\n")[:3]
    tries = [re.findall(r"([\d.]+): \d", line) for line in tuned.splitlines()[2:]]
    assert tries == [["0.05", "0.1", "0.2", "0.4", "0.8"], ["0.025", "0.05", "0.1", "0.2", "0.4"]]
    assert all(re.search(rf" muon_lr +{BEST} ", line) for line in tuned.splitlines()[2:])
    # The same script at the same rate, whose seeds were not those of the tries
    assert compared.count(f"a:muon_lr={BEST}") == 2 and "+0.0000 ± 0.0000" in compared
    rows = rows_of(tmp_path / "out/runs.jsonl")
    seeds = {(row["flags"]["muon_lr"], row["header"]["seed"]) for row in rows}
    assert len(seeds) == len(rows)  # none ran twice
    best = {seed for rate, seed in seeds if rate == str(BEST)}
    assert best == {"0", "1", "2", *map(str, tune.SEEDS)}
    assert "[1/6] a.py:muon_lr=0.2 seed 0: 1.6" in err
    assert " min of tuning left\n" in err and " min of comparing left\n" in err


def test_a_script_from_another_rate_is_no_other_script(script, tmp_path, capsys):
    """Values are a factor of two apart; the lowest point between them is found."""
    words = ["a.py", "a.py:muon_lr=0.17", "--tune", "muon_lr", "--values", 3, "--seeds", 3]
    assert ledger(*words, "--out", "out") == 0
    out = capsys.readouterr().out
    assert len(re.findall(rf"muon_lr +{BEST} ", out)) == out.count(f"a:muon_lr={BEST}") == 2
    assert "+0.0000 ± 0.0000" in out and "*" not in out.split("Difference:")[0]


def test_one_seed_gives_a_difference_without_an_error(script, capsys):
    assert ledger("a.py", "a.py:muon_lr=0.4", "--seeds", 1, "--out", "out") == 0
    row = capsys.readouterr().out.splitlines()[3]
    assert re.search(r"a:muon_lr=0.4 .* [+−]\d\.\d{4}  ", row) and "±" not in row


def test_who_has_fewer_settings_tries_more_values_of_those(script, tmp_path, capsys):
    script.write_text(bowl("muon_lr", "adam_lr"))
    (tmp_path / "b.py").write_text(bowl("adam_lr"))
    words = "--tune muon_lr,adam_lr --values 3 --seeds 2 --out out".split()
    assert ledger("a.py", "b.py", *words) == 0
    table, said = capsys.readouterr().out.split("\n\n")[:2]
    assert "b.py has no muon_lr; it got as many tries of the others." in said
    lines = table.splitlines()[2:]
    assert [line.split()[:3] for line in lines] == [
        ["a.py", "muon_lr", str(BEST)], ["a.py", "adam_lr", str(BEST)],
        ["b.py", "adam_lr", str(BEST)]]
    first, second, alone = [len(re.findall(r"[\d.]+: \d", line)) for line in lines]
    assert first + second == alone >= 6


def test_a_rate_that_diverges_is_worse_than_any_other(script, tmp_path, capsys):
    edit(script, "    ms = 0\n", DIVERGES)
    words = ["a.py:muon_lr=0.2", "--out", "out"]
    assert ledger(*words, "--tune", "muon_lr", "--values", 3, "--seeds", 2) == 0
    assert "0.1: 1.7" in (out := capsys.readouterr().out) and "0.4: diverged" in out
    rows = {row["flags"]["muon_lr"]: row for row in rows_of(tmp_path / "out/runs.jsonl")}
    assert rows["0.4"]["val_loss"] is None and rows["0.2"]["val_loss"] < rows["0.1"]["val_loss"]


def test_where_all_values_diverge_lower_ones_are_tried(script, tmp_path, capsys):
    edit(script, "    ms = 0\n", DIVERGES)
    words = ["--tune", "muon_lr", "--values", 3, "--seeds", 2, "--out", "out"]
    assert ledger("a.py:muon_lr=6.4", *words) == 0
    assert re.search(rf"muon_lr +{BEST} +0.1: .* 1.6: diverged", capsys.readouterr().out)
    edit(script, "cfg.muon_lr > 0.3", "cfg.muon_lr")
    assert ledger("a.py", *words) == 2
    err = capsys.readouterr().err.splitlines()
    assert "a.py diverges at all 11 values of muon_lr, 0.00019" in err[-1]


def test_a_run_that_diverged_is_counted_and_not_compared(script, capsys):
    """All others are compared."""
    edit(script, "    ms = 0\n", DIVERGES.replace("> 0.3:", "> 0.3 and cfg.seed == 1:"))
    words = ["a.py", "a.py:muon_lr=0.4", "a.py:muon_lr=0.3", "--seeds", 3, "--out", "out"]
    assert ledger(*words) == 0
    out, err = capsys.readouterr()
    assert "a.py:muon_lr=0.4 seed 1: diverged" in err
    assert re.search(r"a:muon_lr=0.4 +1 of 3 diverged +\d of 3 runs reach it\n", out)
    assert re.search(r"a:muon_lr=0.3 +1\.\d+ ± .* [+−]\d\.\d+ ± ", out)


def test_a_file_of_runs_makes_them_again_in_another_clone(script, tmp_path, capsys):
    """Without a log. A line that was cut is run again."""
    words = ["a.py", "--seeds", 3, "--out"]
    assert ledger(*words, "out") == 0
    store = (tmp_path / "out/runs.jsonl").rename(tmp_path / "runs.jsonl")
    text = store.read_text()
    (first, *_) = rows_of(store)
    assert [step for step, _ in first["val"]] == [0, 10, 20, 30, 40]
    assert first["val"][-1][1] == pytest.approx(first["val_loss"], abs=1e-4)
    assert first["header"]["device"].startswith("Fake 1") and len(first["script"]) == 16
    capsys.readouterr()
    assert ledger(*words, "elsewhere", "--store", store) == 0
    assert store.read_text() == text and not [*(tmp_path / "elsewhere").rglob("log.txt")]
    store.write_text("{}\n7\n" + text[:-9])  # what is no row is left out
    assert ledger(*words, "elsewhere", "--store", store) == 0
    assert len([*(tmp_path / "elsewhere").rglob("log.txt")]) == 1
    assert store.read_text().splitlines()[-1] == text.splitlines()[-1]
    lines = [*text.replace("Fake 1", "Fake 3").splitlines(keepends=True)[:2], "\n"]
    store.write_text("".join(lines))  # the runs of another machine, but for one
    assert ledger(*words, "elsewhere", "--store", store) == 2
    assert "give another --store" in capsys.readouterr().err
    assert store.read_text() == "".join(lines)  # which keeps the place of those of that machine


def test_a_script_against_itself_with_other_seeds_differs_by_chance(script, tmp_path, capsys):
    assert ledger("a.py", "a.py:seed=100", "--seeds", 4, "--out", "out") == 0
    rows = rows_of(tmp_path / "out/runs.jsonl")
    losses = {int(row["header"]["seed"]): row["val_loss"] for row in rows}
    assert sorted(losses) == [0, 1, 2, 3, 100, 101, 102, 103]
    ours, theirs = [[losses[first + seed] for seed in range(4)] for first in (100, 0)]
    p = scipy.stats.ttest_rel(ours, theirs).pvalue
    out = capsys.readouterr().out
    assert f"(p {p:.2g})" in out and p > 0.01
    # Steps are counted to a loss that all runs of the first one reach.
    curves = [np.array(row["val"]) for row in rows if int(row["header"]["seed"]) < 100]
    target = max(curve[-1, 1] for curve in curves)
    steps = [np.interp(target, curve[::-1, 1], curve[::-1, 0]) for curve in curves]
    assert f"Steps to {target:.4f}\n" in out and f" {np.mean(steps):.1f} ± " in out


@pytest.mark.parametrize("words, message", [
    ("a.py b.py --tune muon_lr", "b.py:muon_lr=0.1 seed 1000: it has other numbers of steps than"),
    ("a.py c.py --tune muon_lr", "c.py:muon_lr=0.1 seed 1000: it has other training data than"),
    ("a.py --tune muon_lr,rate", "--tune rate: no script has this setting"),
    ("a.py d.py --tune muon_lr", "d.py has none of the settings muon_lr"),
    ("a.py --tune muon_lr --values 2", "--tune needs --values 3 at least"),
    ("a.py --tune muon_lr --seeds 1", "--seeds 2 for a standard error"),
    ("a.py --tune preset", "a.py: preset is 'pocket'; what is tuned has to begin at a number"),
    ("a.py:muon_lr=0 --tune muon_lr", "a.py:muon_lr=0: muon_lr is '0'; what is tuned has"),
    ("a.py a.py:val_seq_len=9 --tune muon_lr", "a.py:val_seq_len=9 has val_seq_len 9, a.py has"),
    ("a.py:muon_lr=1,muon_lr=2", "muon_lr is given twice")])
def test_what_cannot_be_compared_is_refused_in_a_line(words, message, script, tmp_path, capsys):
    for name, old, new in (("b", "num_iterations=40", "num_iterations=50"),
                           ("c", "30407b9a0e1c536a", "0"), ("d", "muon_lr", "muon_rate")):
        (tmp_path / f"{name}.py").write_text(bowl("muon_lr").replace(old, new))
    assert ledger(*words.split()) == 2
    err = capsys.readouterr().err.splitlines()
    assert message in err[-1] and not [line for line in err[:-1] if not line.startswith("[")]


@pytest.mark.parametrize("words, message", [
    ("--tune=", "'' does not name settings"), ("--tune=a,,b", "'a,,b' does not name settings"),
    ("--target=nan", "nan is not a number above 0"), ("--target=0", "0 is not a number above 0")])
def test_a_flag_without_a_meaning_is_refused(words, message, capsys):
    with pytest.raises(SystemExit):
        ledger("a.py", words)
    assert message in capsys.readouterr().err


def test_values_are_added_where_the_best_is_near():
    tried = {}
    for _ in range(5):
        tried[tune.next_value(tried, 0.1)] = None
    assert list(tried) == [0.1, 0.05, 0.2, 0.025, 0.4]
    assert tune.next_value({0.05: 3, 0.1: 2, 0.2: 1}, 0.1) == 0.4
    assert tune.next_value({0.05: 1, 0.1: 2, 0.2: 3}, 0.1) == 0.025
