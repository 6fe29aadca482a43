"""Logs are read to the digit in every form; statistics are by the book.

The public logs are small ones in their forms, written here.
"""

import re

import matplotlib.image
import numpy as np
import pytest
from fake_records import NEWEST, PARENT, SCRIPT
from ledger import logs, pages, records, scripts
from ledger.__main__ import main
from scipy import stats

pytest_plugins = ["record_fixtures"]

SOURCE = "import torch\n\nclass Hyperparameters:\n    batch_size = 8*64\n"
RULE = "=" * 100
# The clock is set to zero after ten steps, and the steps around it have no average.
RESET = ("step:0/20 val_loss:10.8258 train_time:275ms step_avg:nanms\n"
         "step:1/20 train_loss:7.7 train_time:22693ms step_avg:nanms\n"
         "step:20/20 val_loss:3.2808 train_time:943ms step_avg:94.34ms\n")
TIMED = ("step:0/20 val_loss:10.8258 train_time:0ms step_avg:0.03ms\n"
         "step:1/20 train_time:94ms step_avg:94.00ms\n"
         "step:20/20 val_loss:3.2808 train_time:943ms step_avg:47.15ms\n")
SECONDS = ("step:0/20 val_loss:10.82580 train_time:0.000s step_avg:0.03ms\n"
           "step:20/20 val_loss:3.28080 train_time:0.943s step_avg:47.15ms\n")
FORMS = {
    "untimed": "s:0 tel:10.8258\ns:0 trl:10.8 lr:0.000001 norm:15.37\ns:20 tel:3.2808\n",
    "ruled": f"{RULE}\n{SOURCE}{RULE}\nRunning python 3.12\n{RULE}\n{RESET}",
    "printed": f"{SOURCE}\n{RULE}\nRunning python 3.12\n\n{RULE}\n{TIMED}",
    "console": f"Fetching 8 files: 100%\ncompile and warmup: 334.5s\n{TIMED.strip()}",
    "track 3": f"{SOURCE}\n{RULE}\nRunning PyTorch 2.11.0\n{RULE}\n{SECONDS}"}


@pytest.mark.parametrize("form", FORMS)
def test_every_public_form_is_read_and_listed(form, tmp_path, capsys):
    (tmp_path / "log.txt").write_text(FORMS[form])
    log = logs.read_log(tmp_path / "log.txt")
    timed = form != "untimed"
    assert {step: loss for step, (loss, _) in log.val.items()} == {0: 10.8258, 20: 3.2808}
    assert log.finished and (log.val_loss, log.last_step) == (3.2808, 20)
    assert log.train_time_ms == (943 if timed else None)
    assert log.val[0][1] == (0 if timed else None)  # the first validation is not training
    assert log.source == (SOURCE if RULE in FORMS[form] else None)
    assert main(["list", str(tmp_path)]) == 0
    row = capsys.readouterr().out.splitlines()[2].split()
    assert row[0] == "log.txt" and row[-1 - timed:] == ["3.2808", "0.016"][:1 + timed]


def test_list_names_what_is_no_log_and_where_a_run_stopped(tmp_path, capsys):
    (tmp_path / "a.out").write_text(TIMED.replace("step:20/20 val", "step:12/20 val"))
    (tmp_path / "b.txt").write_text("step 500: train loss 3.1, val loss 3.2\n")
    (tmp_path / "c.txt").write_text("step:1/20 train_loss:7.7 train_time:22ms step_avg:22.00ms\n")
    assert main(["list", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "12 of 20" in out and "2 file(s) are no log with a validation; known are" in out
    (tmp_path / "a.out").unlink()
    assert main(["list", str(tmp_path)]) == 2
    assert "has no records and no logs: 2 file(s)" in capsys.readouterr().err


@pytest.fixture
def whole(measured):
    """A log with its source."""
    (path,) = (measured / "records" / PARENT / "logs").glob("pocket-seed-0-*.txt")
    return path


def test_a_log_is_read_back_exactly(whole):
    log = logs.read_log(whole)
    text = whole.read_text()
    shown = re.findall(r"^step:(\d+)/40 val_loss:(\S+) train_time:(\d+)ms", text, re.M)
    assert log.val == {int(step): (float(loss), float(ms)) for step, loss, ms in shown}
    assert sorted(log.val) == [0, 10, 20, 30, 40] and sorted(log.train) == [*range(1, 41)]
    assert log.finished and log.header["long_windows"] == "1,1"
    assert log.final["val_loss"] == re.findall(r"^val_loss: (.*)$", text, re.M)[-1]
    assert log.source == SCRIPT
    (other,) = whole.parent.glob("pocket-seed-7-*.txt")
    assert SCRIPT not in other.read_text()
    assert logs.read_log(other).source_sha256 == log.source_sha256
    assert logs.read_log(whole, text.replace("\n", "\r\n")) == log


def test_losses_of_several_tokens_ahead_are_those_of_the_next():
    text = "step:1/2 train_loss:5.2 next_token_loss:2.1 train_time:9ms step_avg:9.00ms\n"
    assert logs.read_log("log.txt", text).train == {1: (2.1, 9)}


def test_a_resumed_run_counts_the_last_line_of_a_step_and_has_no_time(whole):
    head, _, final = whole.read_text().rpartition("---\n")
    log = logs.read_log(
        whole,
        head.partition("step:31/40")[0]
        + "resumed at step:20 from step-000020.pt; steps 21 to 30 are redone\n"
        + "step:30/40 val_loss:1.5555 train_time:77ms step_avg:2.57ms redone:1\n"
        + "step:40/40 val_loss:1.5000 train_time:99ms step_avg:2.57ms\n---\n" + final)
    assert log.val[30] == (1.5555, 77) and log.val[20][0] != 1.5555
    assert log.finished and log.train_time_ms and log.measured_ms is None


@pytest.mark.parametrize("ending", [
    "stopped at step:30 by signal 15\n",
    "step:31/40 val_loss:1.4 train_time:9ms step_avg:2.5",  # cut, so it is not used
    "step:x/40 val_loss:1.0 train_time:1ms step_avg:1ms\nstep:31/40 val_loss:3.x\n"])
def test_what_could_be_read_of_an_unfinished_log_is_used(ending, whole, tmp_path):
    path = tmp_path / "log.txt"
    path.write_text(whole.read_text().partition("step:31/40")[0] + ending)
    log = logs.read_log(path)
    assert sorted(log.val) == [0, 10, 20, 30]
    with pytest.raises(logs.LedgerError, match="is no finished run: it ends at step 30 of 40"):
        records.read_run(path)


# ---- Statistics ----
def sample(mean, std, n, seed=0):
    """n numbers with exactly this mean and standard deviation, up to rounding."""
    raw = np.random.default_rng(seed).normal(size=n)
    return mean + std * (raw - raw.mean()) / raw.std(ddof=1)


def runs(losses, jobs="1", ms=10):
    return [logs.Log(None, header={"seed": str(seed), "target_loss": "3.28"},
                     final={"val_loss": repr(float(loss)), "train_time_ms": str(ms), "jobs": jobs})
            for seed, loss in enumerate(losses)]


def test_p_value_of_the_published_record_21():
    # Published: n=81, mean 3.2787, std 0.0019, p=0.00000002. The exact p depends on digits that
    # the mean and std do not show: the published one lies between those of the roundings.
    low = records.p_below(sample(3.27865, 0.00185, 81), 3.28)
    high = records.p_below(sample(3.27875, 0.00195, 81), 3.28)
    assert low < 2e-8 < high


def test_runs_are_compared_in_pairs_by_seed():
    a = sample(3.2, 0.01, 8)
    b = a + sample(0.01, 0.002, 8, seed=1)
    found = records.compare(runs(a), runs(b, ms=20)[::-1])  # in any order
    assert found.p == pytest.approx(stats.ttest_rel(a, b).pvalue) and found.shown
    assert found.difference == pytest.approx(-0.01) and found.time == 0.5
    assert records.compare(runs(a), runs([*b, 9.0], ms=20)) == found  # a seed of one side alone
    twice = [*runs(a + 0.3), *runs(a - 0.3)]  # a seed counts once, by the mean of its runs
    again = records.compare(twice, runs(b))
    assert (len(again.seeds), again.p) == (8, pytest.approx(found.p, rel=1e-6))
    assert records.compare(runs(a)[:2], runs(b)[2:]) is None
    assert not records.compare(runs(a, jobs="2"), runs(b)).ratios  # as older logs say it
    shift = found.smallest_shown - 0.01  # to the difference that is just significant
    for more, shown in ((-1e-10, False), (1e-10, True)):
        moved = records.compare(runs(b + shift + more), runs(a))
        assert moved.p == pytest.approx(0.01) and moved.shown is shown


def test_equal_losses_are_told_by_a_word():
    same = runs([3.2, 3.3])
    found = records.compare(same, same)
    assert found.equal and pages.runs_cells(same, found)[3] == "equal"
    a = sample(3.28, 0.01, 10)  # equal mathematics, rounded otherwise at every seed alike
    found = records.compare(runs(a), runs(a + 1e-6 + 1e-8 * np.arange(10)))
    assert found.p < 0.01 and not found.shown and not found.equal
    assert records.p_below([3.0], 3.28) is records.p_below([3.0, 3.0], 3.28) is None
    assert records.compare(runs([3.0]), runs([3.1])).p is None
    assert records.compare(runs(a + 0.1), runs(a)).p is None  # alike, but for rounding


@pytest.mark.parametrize("ours, theirs, retuned", [
    ({"muon_lr": "0.05", "val_every": "0"}, {"muon_lr": "0.05", "val_every": "9"}, False),
    ({"muon_lr": "0.05"}, {"muon_lr": "0.1"}, True),
    ({"val_seq_len": "4096"}, {"val_seq_len": "128"}, True),
    ({"head_lr": "0.1"}, {}, False)])  # a rate that the parent does not know is of the idea
def test_a_retuned_preset_is_told(ours, theirs, retuned):
    assert records.is_retuned(logs.Log(None, header=ours), logs.Log(None, header=theirs)) == retuned


# ---- Tables ----
def test_list_tells_the_table(measured, capsys):
    folder = measured / "records"
    page = (folder / "README.md").read_text()
    assert f"| [#5 First]({PARENT}) | 15.2 | 3.2741 (1) | 3e-13 |" in page
    assert f"| [Second]({NEWEST}) | 1.5" in page and "(10) |" in page
    assert "| pocket | `1.78` | `65536` |" in page and page.endswith("\n\nEnd.\n")
    machine = "Preset pocket on Fake 1 (x86_64), 1 rank(s), 1 thread(s), torch 2.13.0+cpu:"
    page = (folder / NEWEST / "README.md").read_text()
    assert f"\n{machine}\n" in page and "No GPU has run this record yet." in page
    rows = [line.split(" | ") for line in page.splitlines() if "± 0.0" in line]
    assert [row[0] for row in rows] == [f"| [#5 First](../{PARENT})", f"| [Second](../{NEWEST})"]
    assert rows[0][4] == "" and re.fullmatch(r"−0.1.* \(p .*\)\*", rows[1][4])
    assert rows[1][5].startswith("×")
    front = (measured / "README.md").read_text()
    assert "**No GPU has run it yet.**" in front
    assert f"| [#5 First](records/{PARENT}) | the first | 15.2 |  |\n" in front
    assert f"| [Second](records/{NEWEST}) | less loss | not public | +3 −3 |\n" in front
    pixels = matplotlib.image.imread(folder / "ladder.png")
    assert pixels.shape[1] == 1800 and pixels[..., :3].std() > 0.02
    assert main(["list", str(folder / NEWEST)]) == 0
    out = capsys.readouterr().out
    assert "Second" in out and "First" not in out and machine in out


def test_what_a_source_means():
    """Comments, docstrings and unused imports decide nothing; what a name stands for does."""
    plain = scripts.meaning("from math import sin as f\nx = f(1)\n")
    assert plain == scripts.meaning('"""Words."""\nimport os\nfrom math import sin as f\nx = f(1)')
    assert plain != scripts.meaning("from math import cos as f\nx = f(1)\n")
    assert plain != scripts.meaning("from math import sin as f\nx = f(2)\n")


def test_diff_goes_by_section_and_sums_up(tmp_path, capsys):
    new = (SCRIPT.replace("import random\n", "")
           .replace("80,  # steps", "90,  # steps of it")
           .replace("    loss=", "    a=1,\n    b=1,\n    loss="))
    found = scripts.diff_sources(SCRIPT, new)
    counts = {title: scripts.count_lines(groups) for title, groups in found.items()}
    assert counts == {"(docstring and imports)": "+0 −1", "Hyperparameters": "+3 −1"}
    (tmp_path / "a.py").write_text(SCRIPT)
    (tmp_path / "b.txt").write_text(f"{new}\n{RULE}\n{TIMED}")  # a log
    assert main(["diff", str(tmp_path / "a.py"), str(tmp_path / "b.txt")]) == 0
    out = capsys.readouterr().out
    assert "\n-import random\n" in out and "\n+    a=1,\n" in out
    assert "+3 −2 lines" in out.splitlines()[0]
