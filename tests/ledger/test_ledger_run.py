"""Scripts are measured in turns; what is finished is kept; what fails is named."""

import json
import re
import signal
import statistics
import subprocess
import sys
import time

import pytest
from conftest import REPO
from fake_records import CHILD, NEWEST, PARENT, SCRIPT, SEEDS, edit, make_records, sha_of
from ledger import logs, table
from ledger.__main__ import main
from ledger.run import settings_of
from scipy import stats

pytest_plugins = ["record_fixtures"]

def run(*words, json_out: bool = False) -> int:
    return main(["run", *map(str, words), *["--json"] * json_out])


def seed_of(folder) -> tuple[str, str]:
    return re.fullmatch(r"(.*)-[0-9a-f]{8}-seed-(\d+)", folder.name).groups()


def test_runs_go_in_turns_and_the_logs_are_kept(measured):
    folders = [path for path in (measured / "out/logs").iterdir() if seed_of(path)]
    order = sorted(folders, key=lambda path: path.stat().st_mtime_ns)
    names = [(name, str(seed)) for seed in range(SEEDS) for name in (PARENT, NEWEST)]
    assert [seed_of(path) for path in order] == names + names[:10]  # losses, then times
    for name, source in ((PARENT, SCRIPT), (NEWEST, CHILD)):
        for kind in table.FOLDERS:
            kept = table.seed_files(measured / "records" / name, kind)
            assert [path.name for path in kept] == [f"seed-{i}.txt" for i in range(len(kept))]
            assert len(kept) == table.SEEDS[kind]
            sizes = [path.read_text().count(source) for path in kept]
            assert sizes == [1] + [0] * (len(kept) - 1)
            assert kept[1].read_text().startswith(f"source sha256: {sha_of(source)}\n===")


def test_results_are_those_of_the_logs(measured, capsys):
    records = measured / "records"
    operands = [records / PARENT, records / NEWEST, "--out", measured / "out"]
    assert run(*operands, json_out=True) == 0
    out, err = capsys.readouterr()
    first, second = json.loads(out)
    losses = []
    for name in (PARENT, NEWEST):
        files = table.seed_files(records / name, "loss")
        losses.append([logs.read_log(path).val_loss for path in files])
    assert [first["losses"], second["losses"]] == losses
    assert first["against"] is None and second["against"]["name"] == PARENT
    p = stats.ttest_rel(losses[1], losses[0]).pvalue
    assert second["against"]["p"] == pytest.approx(p)
    difference = statistics.fmean(losses[1]) - statistics.fmean(losses[0])
    assert second["against"]["difference"] == pytest.approx(difference)
    p = stats.ttest_1samp(losses[0], 1.64, alternative="less").pvalue
    assert first["target"] == 1.64 and first["p_target"] == pytest.approx(p)
    assert run(*operands) == 0
    out = capsys.readouterr().out
    assert all(len(line) <= 120 for line in out.splitlines()) and "paired" in out
    assert f"({SEEDS})" in out and "−0.1" in out


def test_a_script_is_tried_against_itself_with_flags(tmp_path, monkeypatch, capfd):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # from any folder, with a script from any other
    (tmp_path / "s.py").write_text(SCRIPT)
    names = ["s", "s:muon_lr=0.1,long_windows=1,2,loss=1.9", "s:targets=3"]
    operands = [f"../{name.replace('s', 's.py', 1)}" for name in names]
    assert run(*operands, "--seeds", 3, json_out=True) == 0
    first, second, third = json.loads(capfd.readouterr().out)
    assert [found["name"] for found in (first, second, third)] == names
    assert second["against"]["name"] == third["against"]["name"] == "s"
    assert second["against"]["difference"] == pytest.approx(0.3, abs=0.02)
    assert third["against"]["difference"] == 0 and third["against"]["p"] == 1
    headers = [logs.read_log(path).header for path in (tmp_path / "elsewhere").rglob("log.txt")]
    shown = {(header["muon_lr"], header["long_windows"], header["loss"]) for header in headers}
    assert shown == {("0.05", "1,1", "1.6"), ("0.1", "1,2", "1.9")}
    assert (tmp_path / "elsewhere/logs/ledger/data/pocket.py").exists()  # the repository's
    paths = list((tmp_path / "elsewhere").rglob("log.txt"))
    began = {path: path.stat().st_mtime_ns for path in paths[1:]}
    edit(paths[0], "step:31/40", "resumed at step:30 from a.pt\nstep:31/40")
    assert run(*operands, "--seeds", 4) == 0
    assert len(list((tmp_path / "elsewhere").rglob("log.txt"))) == 12
    for path in paths[1:]:  # finished runs are used again, but not a resumed one
        assert path.stat().st_mtime_ns == began[path]
    assert "resumed" not in paths[0].read_text()


def test_two_jobs_run_at_once_on_one_thread_each_and_their_logs_tell(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    both = """
    import time
    deadline = time.monotonic() + 60
    while len(list(Path("logs").iterdir())) < 2:  # each waits for the other to begin
        assert time.monotonic() < deadline
        time.sleep(0.01)
"""
    script = tmp_path / "s.py"
    script.write_text(SCRIPT.replace("    machine = dict", f"{both}    machine = dict"))
    assert run(script, "--seeds", 2, "--jobs", 2, "--out", tmp_path / "out") == 0
    found = [logs.read_log(path) for path in (tmp_path / "out").rglob("log.txt")]
    cores = len(__import__("os").sched_getaffinity(0))
    assert {log.header["threads"] for log in found} == {str(max(1, cores // 2))}
    assert {log.final["jobs"] for log in found} == {"2"} and len(found) == 2


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
    script = tmp_path / "slow.py"
    wait = "    if not Path('go').exists() and cfg.seed == 1:\n"
    wait += "        __import__('time').sleep(60)\n"
    script.write_text(SCRIPT.replace("    folder = Path", wait + "    folder = Path"))
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
    script = tmp_path / "s.py"
    change = "    Path(__file__).write_text(Path(__file__).read_text() + '# changed')\n"
    script.write_text(SCRIPT.replace("    machine = dict", f"{change}    machine = dict"))
    assert run(script, "--seeds", 2, "--out", tmp_path / "out") == 1
    assert "its script was changed" in capfd.readouterr().err


def test_a_record_is_not_written_by_a_try(records, tmp_path, capfd):
    before = {path: path.read_bytes() for path in records.rglob("*.*")}
    operand, out = records / NEWEST, ["--out", tmp_path / "out"]
    assert run(operand, "--seeds", 3, *out) == 0
    told = f"{NEWEST}: not kept: 3 seeds of pocket on cpu (fake); by the rules they are 10"
    assert told in capfd.readouterr().err
    assert run(f"{operand}:loss=1.4", "--seeds", 1, *out) == 0
    assert "kept" not in capfd.readouterr().err
    edit(operand / "train_gpt.py", "cpu (fake)", "host standing in for an H100")
    assert run(operand, *out) == 0
    assert "10 seeds of pocket on host standing in" in capfd.readouterr().err
    del before[operand / "train_gpt.py"]
    assert all(path.read_bytes() == content for path, content in before.items())
