"""Logs are read to the digit; statistics are by the book."""

import re

import numpy as np
import pytest
from fake_records import PARENT, SCRIPT
from ledger import logs, pages, records
from scipy import stats

pytest_plugins = ["record_fixtures"]


@pytest.fixture
def whole(measured):
    (path,) = (measured / "records" / PARENT / "logs").glob("pocket-seed-0-*.txt")
    return path


def test_a_log_is_read_back_exactly(whole):
    log = logs.read_log(whole)
    text = whole.read_text()
    shown = re.findall(r"^step:(\d+)/40 val_loss:(\S+) train_time:(\d+)ms", text, re.M)
    assert log.val == {int(step): (float(loss), float(ms)) for step, loss, ms in shown}
    assert sorted(log.val) == [0, 10, 20, 30, 40] and sorted(log.train) == [*range(1, 41)]
    assert log.finished and log.header["stages"].startswith("(Stage(window=1, share=1.0), Stage(")
    assert log.final["val_loss"] == re.findall(r"^val_loss: (.*)$", text, re.M)[-1]
    assert log.source == SCRIPT and logs.read_log(whole, text.replace("\n", "\r\n")) == log
    ahead = "step:1/2 train_loss:5.2 next_token_loss:2.1 train_time:9ms step_avg:9.00ms\n"
    assert logs.read_log("log.txt", ahead).train == {1: (2.1, 9)}  # of several tokens, the next's


@pytest.mark.parametrize("share, old, new, is_timed", [  # of the time in which it did not wait
    (0.91, "", "", True), (0.89, "", "", False),
    (0.89, "world_size: 1", "world_size: 2", True),  # ranks wait for each other
    (0.89, "\ndevice: Fake", "\ncuda: 13.0\ndevice: Fake", True),  # and processes for their GPU
    (1, "step:31/40", "resumed at step:30 from a.pt\nstep:31/40", False),
    (1, f"{logs.RULE}\npreset", f"{logs.RULE}\njobs: 2\npreset", False)])
def test_times_are_those_of_whole_runs_alone_on_their_machine(
        share, old, new, is_timed, whole, tmp_path):
    text = whole.read_text()
    time_ms = int(re.search(r"\ntrain_time_ms: (\d+)", text)[1])
    text = text.replace(f"process_time_ms: {time_ms}", f"process_time_ms: {share * time_ms}")
    assert old in text and f": {share * time_ms}\n" in text
    (tmp_path / "log.txt").write_text(text.replace(old, new))
    assert bool(logs.read_run(tmp_path / "log.txt").measured_ms) == is_timed


@pytest.mark.parametrize("old, new, words", [
    (r"step:40/40 train_loss:(\S+) train_time:\d+", r"step:40/40 train_loss:\1 train_time:1",
     "a step at 1 ms, after one at 1"),
    (r"train_time:(?=\d)", "train_time:-", "a step at -"),
    (r"train_time:\d+ms", "train_time:9e307ms", "a step at 9e+307 ms"),
    (r"train_time_ms: \d+", "train_time_ms: -5", "train_time_ms is -5"),
    (r"device: Fake", "device: F\u0430ke", "which is not ASCII"),
    (r"\nseed: 0", "\nseed: \uff10", "which is not ASCII"),
    (r"\nworld_size: 1", "\nworld_size: one", "'one'"),
    (r"\nval_tokens: 65536", "\nval_tokens: 65536\nval_tokens: 9", "val_tokens twice"),
    (r"\nval_digest: .*", "", "no val_digest"),
    (r"\nparameters: 1234\n", "\nparameters: 12", "no parameters")])  # a file that was cut
def test_what_no_run_writes_is_not_read(old, new, words, whole, tmp_path):
    text, count = re.subn(old, new, whole.read_text())
    assert count
    (tmp_path / "log.txt").write_text(text)
    with pytest.raises(logs.LedgerError, match="cannot be read: .*" + re.escape(words)):
        logs.read_run(tmp_path / "log.txt")


# ---- Statistics ----
def runs(losses, ms=10, seeds=None):
    return [logs.Log(None, seed=seed, measured_ms=ms, val_loss=float(loss))
            for seed, loss in zip(seeds or range(99), losses)]


def test_runs_are_compared_in_pairs_of_seeds_each_of_which_counts_once():
    a, b = np.random.default_rng(0).normal([[3.28], [3.27]], 0.01, (2, 10))
    ours, theirs = runs(b, 9), runs(a, 12)
    found = records.compare([*ours, *runs([9.9], seeds=[77])], theirs[::-1])
    assert found.difference == pytest.approx(b.mean() - a.mean())
    p, smallest = found.test()
    assert p == pytest.approx(stats.ttest_rel(b, a).pvalue)
    assert (found.time, found.ratios) == (0.75, 10 * [0.75])
    # A difference as large as the smallest that is shown has p = 0.01.
    moved = records.compare(runs(b - found.difference + smallest), theirs)
    assert moved.test()[0] == pytest.approx(0.01)
    assert records.compare(ours, runs([1.0], seeds=[77])) is None
    assert records.compare(runs([3.0]), runs([3.1])).test() is None
    assert records.compare(runs(a + 0.1), runs(a)).test() is None  # alike, but for rounding
    many = runs([3.1, 3.3, 3.0], seeds=[0, 0, 1])
    assert records.by_seed(many) == {0: (pytest.approx(3.2), 10), 1: (3.0, 10)}
    assert pages.spread(pages.losses_of(many)) == "3.1000 ± 0.1414 (2)"
