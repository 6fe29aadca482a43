"""Scripts are measured in turns; what is finished is kept; what fails is named."""

import glob
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from conftest import REPO
from fake_records import CHILD, NEWEST, PARENT, SCRIPT, SEEDS, edit, make_records, sha_of
from ledger import logs
from ledger.__main__ import main
from ledger.table import settings_of
from scipy import stats

pytest_plugins = ["record_fixtures"]


def run(*words) -> int:
    return main(["run", *map(str, words)])


def seed_of(folder) -> tuple[str, str]:
    return re.fullmatch(r"(.*)-[0-9a-f]{8}-seed-(\d+)", folder.name).groups()


def write_script(path, line, new):
    """The fake script with a line put before the one that begins so."""
    path.write_text(SCRIPT)
    edit(path, f"    {line}", f"{new}    {line}")
    return path


def test_runs_go_in_turns(measured):
    folders = [path for path in (measured / "out/logs").iterdir() if seed_of(path)]
    order = sorted(folders, key=lambda path: path.stat().st_mtime_ns)
    assert [seed_of(path) for path in order] == [
        (name, str(seed)) for seed in range(SEEDS) for name in (PARENT, NEWEST)]


def test_filed_logs_lie_in_their_records_and_one_of_them_is_whole(measured):
    for name, source in ((PARENT, SCRIPT), (NEWEST, CHILD)):
        kept = logs.seed_files(measured / "records" / name / "logs")
        assert [path.name for path in kept] == [f"seed-{i}.txt" for i in range(SEEDS)]
        sizes = [path.read_text().count(source) for path in kept]
        assert sizes == [1] + [0] * (SEEDS - 1)
        assert kept[1].read_text().startswith(f"source sha256: {sha_of(source)}\n===")


def test_results_are_those_of_the_logs(measured, capsys):
    records = measured / "records"
    operands = [records / PARENT, records / NEWEST, "--out", measured / "out"]
    assert run(*operands, "--json") == 0
    first, second = json.loads(capsys.readouterr().out)
    losses = []
    for name in (PARENT, NEWEST):
        files = logs.seed_files(records / name / "logs")
        losses.append([logs.read_log(path).val_loss for path in files])
    assert [first["losses"], second["losses"]] == losses
    p = stats.ttest_1samp(losses[0], 1.64, alternative="less").pvalue
    assert first["target"] == 1.64 and first["p_target"] == pytest.approx(p)
    assert first["against"] is None and second["against"]["name"] == PARENT
    p = stats.ttest_rel(losses[1], losses[0]).pvalue
    assert second["against"]["p"] == pytest.approx(p)
    assert run(*operands) == 0
    out, err = capsys.readouterr()
    assert all(len(line) <= 120 for line in out.splitlines()) and "paired" in out
    assert f"({SEEDS})" in out and "−0.1" in out and "×" in out and " s\n" in err
    (command,) = re.findall(r"to file the records' logs: python records/ledger (file .*)\n", err)
    found = [path for word in command.split()[1:] for path in glob.glob(word)]
    assert len(found) == 2 * SEEDS and all(path.endswith("/log.txt") for path in found)


def test_a_script_is_tried_against_itself_with_flags(tmp_path, monkeypatch, capfd):
    place = tmp_path / "elsewhere"  # from any folder, with a script from any other
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.delenv("OMP_NUM_THREADS")
    (tmp_path / "s.py").write_text(SCRIPT)
    names = ["s", "s:muon_lr=0.1,long_windows=1,2,loss=1.9", "s:save_every=7"]
    operands = [f"../{name.replace('s', 's.py', 1)}" for name in names]
    assert run(*operands, "--seeds", 2, "--json") == 0
    first, second, third = json.loads(capfd.readouterr().out)
    assert [found["name"] for found in (first, second, third)] == names
    assert second["against"]["name"] == third["against"]["name"] == "s"
    assert second["against"]["difference"] == pytest.approx(0.3, abs=0.02)
    assert third["against"]["difference"] == 0 and third["against"]["p"] == 1
    paths = list(place.rglob("log.txt"))
    headers = [logs.read_log(path).header for path in paths]
    shown = {(header["muon_lr"], header["long_windows"], header["loss"]) for header in headers}
    assert shown == {("0.05", "1,1", "1.6"), ("0.1", "1,2", "1.9")}
    assert {header["threads"] for header in headers} == {str(len(os.sched_getaffinity(0)))}
    assert (place / "logs/ledger/data/pocket.py").exists()  # the repository's
    began = {path: path.stat().st_mtime_ns for path in paths[1:]}
    edit(paths[0], "step:31/40", "resumed at step:30 from a.pt\nstep:31/40")
    assert run(*operands, "--seeds", 3) == 0
    out = capfd.readouterr().out
    assert all(f"\n{name} " in out for name in names)  # whole, or long ones look alike
    assert len(list(place.rglob("log.txt"))) == 9
    for path in paths[1:]:  # finished runs are used again, but not a resumed one
        assert path.stat().st_mtime_ns == began[path]
    assert "resumed" not in paths[0].read_text()


def test_two_jobs_share_the_cores_and_their_logs_tell(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.delattr(os, "sched_getaffinity")  # macOS has none
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    both = """
    import time
    deadline = time.monotonic() + 60
    while len(list(Path("logs").iterdir())) < 2:  # each waits for the other to begin
        assert time.monotonic() < deadline
        time.sleep(0.01)
    names = "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_"
    assert [os.environ[name] for name in names] == ["2147483647", "0"]
"""
    script = write_script(tmp_path / "s.py", "machine = dict", both)
    assert run(script, "--seeds", 2, "--jobs", 2, "--out", tmp_path / "out") == 0
    out, err = capsys.readouterr()
    assert "×" not in out and " s\n" not in err  # their times are no measure
    found = [logs.read_log(path) for path in (tmp_path / "out").rglob("log.txt")]
    assert [(log.header["threads"], log.final["jobs"]) for log in found] == 2 * [("3", "2")]


def test_a_script_that_trains_when_it_is_imported_is_not_imported(tmp_path):
    trap = tmp_path / "trap"
    (tmp_path / "s.py").write_text(f"open({str(trap)!r}, 'w')\n")
    assert settings_of(tmp_path / "s.py", {"preset": "pocket"}) == {}
    assert not trap.exists()


def test_a_failing_run_is_named_and_the_rest_kept(tmp_path, capfd):
    records = make_records(tmp_path)
    words = [records / PARENT, f"{records / NEWEST}:muon_lr=13", "--out", tmp_path / "out"]
    assert run(*words, "--seeds", 3) == 1
    err = capfd.readouterr().err.splitlines()
    assert f"[4/6] {NEWEST}:muon_lr=13 seed 1: exit status 1" in err[-1]
    assert "out of luck" in err[-1] and "the same command goes on" in err[-1]
    done = {seed_of(path.parent) for path in (tmp_path / "out").rglob("log.txt")}
    assert done >= {(PARENT, "0"), (NEWEST, "0"), (PARENT, "1")}
    assert not list(records.rglob("seed-*.txt"))


def test_interrupted_runs_go_on_where_they_stopped(tmp_path):
    wait = """
    if not Path('go').exists() and cfg.seed == 1:
        __import__('time').sleep(60)
"""
    script = write_script(tmp_path / "slow.py", "folder = Path", wait)
    script.write_text(script.read_text().replace("parse_args", "parse"))  # it is not asked: quicker
    command = [sys.executable, REPO / "records/ledger", "run", script, "--out", tmp_path]
    command += ["--seeds", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert "[1/2] slow seed 0" in process.stderr.readline()
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=30)[1]
    assert process.returncode == 1 and "Traceback" not in err, err
    assert "stopped; what is done is kept in" in err
    (tmp_path / "go").touch()
    (first,) = (path.stat().st_mtime_ns for path in tmp_path.rglob("log.txt"))
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "[2/2] slow seed 1: 1." in done.stderr, done.stderr
    assert first == min(path.stat().st_mtime_ns for path in tmp_path.rglob("log.txt"))


def test_a_script_that_changes_while_it_runs_is_found(tmp_path, capfd):
    change = "    Path(__file__).write_text(Path(__file__).read_text() + '# changed')\n"
    script = write_script(tmp_path / "s.py", "machine = dict", change)
    assert run(script, "--seeds", 1, "--out", tmp_path / "out") == 1
    assert "its script was changed" in capfd.readouterr().err


def test_a_missing_package_is_told_before_anything_is_run(tmp_path, monkeypatch, capsys):
    (tmp_path / "s.py").write_text(SCRIPT)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "scipy" else 1)
    assert run(tmp_path / "s.py", "--out", tmp_path / "out") == 2
    told = "ledger: scipy is not installed; pip install -r requirements-dev.txt\n"
    assert capsys.readouterr().err == told and not (tmp_path / "out").exists()
