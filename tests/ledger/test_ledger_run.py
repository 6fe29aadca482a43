"""Scripts are measured interleaved; what is finished is kept; what fails is named."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import scipy
from conftest import PATIENCE, REPO
from fake_records import CHILD, NEWEST, PARENT, SCRIPT, SEEDS, edit, make_records
from ledger import logs
from ledger.__main__ import main
from ledger.scripts import count_changes, diff_sources, meaning, settings_of

pytest_plugins = ["record_fixtures"]


def run(*words) -> int:
    return main(["run", *map(str, words)])


def headers_in(folder):
    return [logs.read_log(path).header for path in folder.rglob("log.txt")]


def test_runs_are_interleaved_and_results_are_those_of_the_logs(measured, capsys):
    paths = (measured / "out/logs").glob("*/log.txt")
    order = sorted(paths, key=lambda path: path.stat().st_mtime_ns)
    names = [re.sub("-[0-9a-f]{8}-seed-", " ", path.parent.name) for path in order]
    assert names == [f"{name} {seed}" for seed in range(SEEDS) for name in (PARENT, NEWEST)]
    losses = [logs.read_log(path).val_loss for path in order]
    parent, newest = losses[::2], losses[1::2]
    p = scipy.stats.ttest_rel(newest, parent).pvalue
    records = measured / "records"
    assert run(records / PARENT, records / NEWEST, "--out", measured / "out") == 0  # all are kept
    out, err = capsys.readouterr()
    gaps = [ours - theirs for ours, theirs in zip(newest, parent)]
    words = f"{sum(gaps) / SEEDS:.4f} ± {scipy.stats.sem(gaps):.4f} (p {p:.2g})*"
    assert words.replace("-", "−") in out and f"({SEEDS})" in out and "×" in out and " s\n" in err


def test_a_folder_of_records_is_run_and_filed_by_one_command(tmp_path):
    """Seed by seed over all records, two at once, and again without training anything."""
    records = make_records(tmp_path)
    words = [records, "--seeds", 3, "--jobs", 2, "--file", "--folder", records,
             "--out", tmp_path / "out"]
    assert run(*words) == 0
    began = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("log.txt")}
    edit(records / NEWEST / "train_gpt.py", "import random", "import random  # a comment")
    assert run(*words) == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("log.txt")} == began
    for name, source in ((PARENT, SCRIPT), (NEWEST, CHILD)):
        texts = [path.read_text() for path in (records / name / "logs").iterdir()]
        assert [text.startswith(source) for text in texts] == 3 * [True]
    edit(records / NEWEST / "train_gpt.py", "import random  # a comment", "import random")
    assert main(["list", str(records), "--write"]) == main(["verify", str(records)]) == 0


def test_scripts_of_one_name_flags_data_and_threads_make_runs_of_their_own(
        tmp_path, monkeypatch, capsys):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "s.py").write_text(SCRIPT)
    (tmp_path / "elsewhere/s.py").write_text(SCRIPT.replace("loss: float = 1.6", "loss: float = 2"))
    (tmp_path / "mine.bin").write_text("text")
    words = ["../s.py", "s.py", f"s.py:train_files={tmp_path}/mine.bin", "--seeds", 1]
    assert run(*words) == run(*words) == 0
    assert (tmp_path / "elsewhere/logs/ledger/data/pocket.py").exists()  # the repository's
    assert [header["loss"] for header in headers_in(tmp_path)].count("2") == 2
    (tmp_path / "mine.bin").write_text("another text")
    assert run(*words) == 0 and len(headers_in(tmp_path)) == 4
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert run(*words) == 0 and len(headers_in(tmp_path)) == 7
    store = tmp_path / "elsewhere/logs/ledger/runs.jsonl"
    rows = store.read_text().replace("Fake 1", "Fake 3", 5)  # of a disk that two machines share
    store.write_text(rows)
    assert run(*words) == 2
    assert "Fake 3" in (err := capsys.readouterr().err) and "give another --out" in err
    (tmp_path / "t.py").write_text(SCRIPT.replace("1407c02db97ab9a7", "2"))
    assert run("../s.py", "../t.py", "--seeds", 1, "--out", "other") == 2
    assert "t.py seed 0: it has other validation data than" in capsys.readouterr().err


def test_two_jobs_of_any_script_run_at_once_and_their_logs_tell(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("OMP_NUM_THREADS")
    (tmp_path / "own.py").write_text(f"""
import os, pathlib, sys, time
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
folder = pathlib.Path("logs", flags["--run_id"])
folder.mkdir(parents=True)
deadline = time.monotonic() + {PATIENCE}
while len(list(pathlib.Path("logs").iterdir())) < 2:  # each waits for the other to begin
    assert time.monotonic() < deadline
log = open(folder / "log.txt", "w")
print(open(__file__).read() + "{'=' * 100}", "seed: " + flags["--seed"], sep="\\n", file=log)
print("step:1/1 val_loss:3.2 train_time:943ms step_avg:943ms", file=log)
""")
    words = [tmp_path / "own.py", "--seeds", 2, "--jobs", 2, "--out", tmp_path / "out"]
    assert run(*words) == 0
    out, err = capsys.readouterr()
    assert "×" not in out and " s\n" not in err  # their times are no measure
    assert [header["jobs"] for header in headers_in(tmp_path)] == ["2", "2"]
    path = next(tmp_path.rglob("log.txt"))
    assert logs.read_log(path).source == (tmp_path / "own.py").read_text()
    (tmp_path / "out/runs.jsonl").unlink()  # as if the ledger had been killed before it wrote it
    edit(path, "\njobs: 2\n", "\n")
    assert run(*words) == 0 and "\njobs: 2\n" in path.read_text()


@pytest.mark.parametrize("line, words", [
    ("sys.exit('bad luck')", "exit status 1, its last words: bad luck"),
    ("import beside", "No module named 'beside'; what ran is a copy without the files beside it"),
    ("return", "it left no finished logs/s-"),
    ("Path(__file__).write_text(Path(__file__).read_text() + '# changed')",
     "its log has another source")])
def test_a_failing_run_is_named(line, words, tmp_path, capsys):
    (tmp_path / "beside.py").touch()
    (tmp_path / "s.py").write_text(SCRIPT)
    edit(tmp_path / "s.py", "    folder = Path", f"    {line}\n    folder = Path")
    assert run(tmp_path / "s.py", "--seeds", 1, "--out", tmp_path / "out") == 2
    err = capsys.readouterr().err
    assert f"ledger: [1/1] {tmp_path}/s.py seed 0: " in err and words in err
    assert "what is done is kept in" in err


def test_every_seed_trains_the_script_as_it_was_when_the_run_began(tmp_path, capsys):
    """It is edited while the first seed runs. The same command then takes none of these runs."""
    script = tmp_path / "s.py"
    script.write_text(SCRIPT)
    line = f"Path({str(script)!r}).write_text('edited = True')"
    edit(script, "    folder = Path", f"    {line}\n    folder = Path")
    source = script.read_text()
    assert run(script, "--seeds", 2, "--out", tmp_path / "out") == 0
    found = [logs.read_log(path).source for path in tmp_path.rglob("log.txt")]
    assert found == [source, source]
    assert run(script, "--seeds", 1, "--out", tmp_path / "out") == 2  # what is there now trains not


def test_without_scipy_runs_are_compared_without_p_values(measured, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    records = measured / "records"
    assert run(records / PARENT, records / NEWEST, "--out", measured / "out") == 0
    out, err = capsys.readouterr()
    assert "no p-values: pip install -r requirements-dev.txt" in err
    assert re.search(r"−0\.1\d+ ± 0\.00\d+  +×", out) and "(p " not in out


@pytest.mark.slow
def test_interrupted_runs_go_on_where_they_stopped(tmp_path):
    wait = f"if cfg.seed and not Path('go').exists(): __import__('time').sleep({PATIENCE})"
    (tmp_path / "slow.py").write_text(SCRIPT)
    edit(tmp_path / "slow.py", "    ms = 0\n", f"    ms = 0\n    {wait}\n")
    command = [sys.executable, REPO / "records/ledger", "run", tmp_path / "slow.py"]
    command += ["--seeds", "2", "--out", tmp_path]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               start_new_session=True)
    assert "slow.py seed 0" in process.stderr.readline()
    deadline = time.monotonic() + PATIENCE
    while len([*tmp_path.glob("logs/*")]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # as ctrl-C does
    err = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 2 and "Traceback" not in err, err
    assert "stopped; the same command goes on; what is done is kept in" in err
    (tmp_path / "go").touch()
    (first,) = (path.stat().st_mtime_ns for path in tmp_path.rglob("log.txt"))
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "slow.py seed 1: 1." in done.stderr, done.stderr
    assert first == min(path.stat().st_mtime_ns for path in tmp_path.rglob("log.txt"))


def test_standard_streams_may_be_closed():
    words = [sys.executable, REPO / "records/ledger", "diff", *2 * [REPO / "train_gpt.py"]]
    assert subprocess.run(["bash", "-c", '"$@" >&- 2>&-', "", *words]).returncode == 0


@pytest.mark.parametrize("command, words", [
    ("run a.py a.py:seed=x", "'seed=x' is no name=value that"),
    ("run a.py bad.py", "bad.py: invalid syntax"),
    ("run a.py --jobs 0", "--jobs: 0 is not a whole number"),
    ("run a.py --out a.py/out", "a.py/out"),
    ("verify folder", "folder has no record.json; give records/ or a record"),
    ("diff a.py notes.txt", "notes.txt has no step that can be read"),
    ("file binary.bin", "refused: binary.bin: byte 1 is not text"),
    ("site folder --out site", "no records there, so no pages; give a folder that has")])
def test_bad_input_is_answered_in_a_line_and_nothing_is_written(
        command, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, text in (("a.py", SCRIPT), ("bad.py", "def f(:\n"),
                       ("2026-01-01_X/record.json", "[]"), ("2026-01-01_X/train_gpt.py", SCRIPT),
                       ("binary.bin", "a\xff\xfe"), ("notes.txt", "notes"), ("folder/a", "")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text.encode("latin1"))
    try:
        status = main(command.split())
    except SystemExit as error:
        status = error.code
    err = capsys.readouterr().err
    assert status == 2 and words in err and err.count("\n") == 1 and "Traceback" not in err, err
    assert not (tmp_path / "logs").exists() and not (tmp_path / "site").exists()


# ---- Scripts ----
def test_a_source_is_read_and_not_run():
    """Comments and docstrings mean nothing; what is computed does; tables are no flags."""
    plain = meaning("from math import sin as f\nx = f(1)\n")
    assert plain == meaning('"""Words."""\nfrom math import sin as f\nx = f(1)  # one')
    assert plain != meaning("from math import cos as f\nx = f(1)\n")
    assert plain != meaning("from math import sin as f\nx = f(2)\n")
    assert settings_of("open('trap', 'w')\n", "pocket") == {}
    assert settings_of(SCRIPT, "record")["val_tokens"] == "10485760"
    assert settings_of(SCRIPT, "pocket")["val_tokens"] == "65536"
    assert "stages" not in settings_of(SCRIPT, "pocket")


def test_diff_goes_by_section_and_sums_up(tmp_path, capsys):
    new = (SCRIPT.replace("import random\n", "").replace("A run's log", "A log")
           .replace("    loss: ", "    a: int = 1\n    b: int = 1\n    loss: "))
    found = diff_sources(SCRIPT, new)
    assert {title: count_changes(lines) for title, lines in found.items()} == {
        "Docstring": "+1 −1", "Imports": "+0 −1", "Hyperparameters": "+2 −0"}
    (tmp_path / "a.py").write_text(SCRIPT)
    (tmp_path / "b.txt").write_text(f"{new}\n{'=' * 100}\nstep:1/1 val_loss:3.2\n")  # a log
    assert main(["diff", str(tmp_path / "a.py"), str(tmp_path / "b.txt")]) == 0
    out = capsys.readouterr().out
    assert "\n-import random\n" in out and "\n+    a: int = 1\n" in out
    assert "+3 −2 lines" in out.splitlines()[0]
