"""Scripts are measured in turns; what is finished is kept; what fails is named."""

import re
import signal
import subprocess
import sys
import time

import pytest
from conftest import REPO
from fake_records import CHILD, NEWEST, PARENT, SCRIPT, SEEDS, edit, make_records, set_gain
from ledger import logs
from ledger import run as runs
from ledger.__main__ import main
from scipy import stats

pytest_plugins = ["record_fixtures"]
pytestmark = pytest.mark.usefixtures("no_ladder")


def run(*words) -> int:
    return main(["run", *map(str, words)])


def write_script(path, line, new):
    """The fake script with a line put before the one that begins so."""
    path.write_text(SCRIPT)
    edit(path, f"    {line}", f"{new}    {line}")
    return path


def test_runs_go_in_turns_and_results_are_those_of_the_logs(measured, capsys):
    paths = (measured / "out/logs").glob("*/log.txt")
    order = sorted(paths, key=lambda path: path.stat().st_mtime_ns)
    names = [re.sub("-[0-9a-f]{8}-seed-", " ", path.parent.name) for path in order]
    assert names == [f"{name} {seed}" for seed in range(SEEDS) for name in (PARENT, NEWEST)]
    losses = [logs.read_log(path).val_loss for path in order]
    parent, newest = losses[::2], losses[1::2]
    p = stats.ttest_rel(newest, parent).pvalue
    records = measured / "records"
    assert run(records / PARENT, records / NEWEST, "--out", measured / "out") == 0  # all are kept
    out, err = capsys.readouterr()
    words = f"{sum(newest) / SEEDS - sum(parent) / SEEDS:.4f} (p {p:.2g})"
    assert words.replace("-", "−") in out and f"({SEEDS})" in out and "×" in out and " s\n" in err
    assert "the same command with --file files the records' logs" in err


def test_a_folder_of_records_is_run_and_filed_by_one_command(tmp_path):
    """Seed by seed over all records, two at once, and again without training anything."""
    records = make_records(tmp_path)
    set_gain(records, None)
    words = [records, "--seeds", 3, "--jobs", 2, "--file", "--out", tmp_path / "out"]
    assert run(*words) == 0
    began = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("log.txt")}
    edit(records / NEWEST / "train_gpt.py", "import random", "import random  # a comment")
    assert run(*words) == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("log.txt")} == began
    assert len(began) == 6
    for name, source in ((PARENT, SCRIPT), (NEWEST, CHILD)):
        texts = [path.read_text() for path in sorted((records / name / "logs").iterdir())]
        assert [text.count(source) for text in texts] == [1, 0, 0]  # one is whole
    edit(records / NEWEST / "train_gpt.py", "import random  # a comment", "import random")
    assert main(["list", str(records), "--write"]) == main(["verify", str(records)]) == 0


def test_two_scripts_of_one_name_are_two_contestants(tmp_path, monkeypatch, capsys):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "s.py").write_text(SCRIPT)
    (tmp_path / "elsewhere/s.py").write_text(SCRIPT.replace("loss=1.6", "loss=1.9"))
    operands = ["../s.py", "s.py", "s.py:muon_lr=0.1,long_windows=1,2"]
    assert run(*operands, "--seeds", 2) == 0
    rows = capsys.readouterr().out.splitlines()[2:5]
    assert [row.split("  ")[0] for row in rows] == ["../s", "s", "s:muon_lr=0.1,long_windows=1,2"]
    assert "+0.2" in rows[1] or "+0.3" in rows[1]
    assert (tmp_path / "elsewhere/logs/ledger/data/pocket.py").exists()  # the repository's
    headers = [logs.read_log(path).header for path in tmp_path.rglob("log.txt")]
    assert {(header["muon_lr"], header["loss"]) for header in headers} == {
        ("0.05", "1.6"), ("0.05", "1.9"), ("0.1", "1.9")}


def test_runs_of_two_settings_are_never_pooled(tmp_path, monkeypatch, capsys):
    (tmp_path / "s.py").write_text(SCRIPT)
    words = [tmp_path / "s.py", "--out", tmp_path / "out", "--seeds"]
    assert run(*words, 1) == 0
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert run(*words, 2) == 0  # begins anew with two threads
    threads = [logs.read_log(path).header["threads"] for path in tmp_path.rglob("log.txt")]
    assert sorted(threads) == ["1", "2", "2"]
    edit(next(path for path in tmp_path.rglob("log.txt") if "threads: 2" in path.read_text()),
         "device: Fake 1", "device: Fake 3")  # kept on a disk that two machines share
    assert run(*words, 2) == 1
    assert "Fake 3" in (err := capsys.readouterr().err) and "give another --out" in err


def test_other_data_of_the_same_name_is_trained_on_anew(tmp_path):
    (tmp_path / "s.py").write_text(SCRIPT)
    (tmp_path / "mine.bin").write_text("text")
    words = [f"{tmp_path}/s.py:train_files={tmp_path}/mine.bin", "--seeds", 1, "--out", tmp_path]
    assert run(*words) == run(*words) == 0
    assert len([*tmp_path.rglob("log.txt")]) == 1
    (tmp_path / "mine.bin").write_text("another text")
    assert run(*words) == 0
    assert len([*tmp_path.rglob("log.txt")]) == 2


def test_two_jobs_run_at_once_and_their_logs_tell(tmp_path, monkeypatch, capsys):
    """In the header, so a log that is cut at its end tells as well."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    both = """
    import time
    deadline = time.monotonic() + 60
    while len(list(Path("logs").iterdir())) < 2:  # each waits for the other to begin
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert os.environ["MALLOC_TRIM_THRESHOLD_"] == "2147483647"
"""
    script = write_script(tmp_path / "s.py", "machine = dict", both)
    words = [script, "--seeds", 2, "--jobs", 2, "--out", tmp_path / "out"]
    assert run(*words) == 0
    out, err = capsys.readouterr()
    assert "×" not in out and " s\n" not in err  # their times are no measure
    paths = list((tmp_path / "out").rglob("log.txt"))
    found = [logs.read_log(path) for path in paths]
    assert [(log.header["threads"], log.header["jobs"]) for log in found] == 2 * [("1", "2")]
    assert logs.read_log(paths[0], found[0].source + found[0].body[:-9]).measured_ms is None
    edit(paths[0], "\njobs: 2\n", "\n")  # as if the ledger had been killed before it wrote the line
    assert run(*words) == 0 and "\njobs: 2\n" in paths[0].read_text()


@pytest.mark.parametrize("ruled", [False, True])
def test_jobs_are_told_in_logs_of_other_forms(ruled, tmp_path):
    """Of which one has a rule before its source, and the other has none after its header."""
    rule = "print('=' * 100, file=log)\n"
    lines = [
        "import sys, pathlib",
        "flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))",
        "folder = pathlib.Path('logs', flags['--run_id'])",
        "folder.mkdir(parents=True)",
        "log = open(folder / 'log.txt', 'w')",
        rule * ruled + "print(open(__file__).read(), file=log)",
        rule + "print('seed: ' + flags['--seed'] + '\\ntarget_loss: 3.28', file=log)",
        rule * ruled + "print('step:1/1 val_loss:3.2 train_time:943ms step_avg:943ms', file=log)"]
    (tmp_path / "own.py").write_text("\n".join(lines) + "\n")
    assert run(tmp_path / "own.py", "--seeds", 1, "--jobs", 2, "--out", tmp_path / "out") == 0
    (path,) = tmp_path.rglob("log.txt")
    log = logs.read_log(path)
    assert (log.jobs, log.measured_ms, log.val_loss) == ("2", None, 3.2)
    assert log.source == (tmp_path / "own.py").read_text()


@pytest.mark.parametrize("line, new, words", [
    ("folder = Path", "    sys.exit('bad luck')\n", "exit status 1, its last words: bad luck"),
    ("folder = Path", "    return\n", "it wrote no logs/s-"),
    ("lines = [", "    del header['seed']\n", "the header of its log has no seed"),
    ("machine = dict", "    Path(__file__).write_text(Path(__file__).read_text() + '# changed')\n",
     "its script was changed")])
def test_a_failing_run_is_named(line, new, words, tmp_path, capsys):
    script = write_script(tmp_path / "s.py", line, new)
    assert run(script, "--seeds", 1, "--out", tmp_path / "out") == 1
    err = capsys.readouterr().err
    assert f"ledger: [1/1] {script} seed 0: {words}" in err and "what is done is kept in" in err


def test_interrupted_runs_go_on_where_they_stopped(tmp_path):
    wait = """
    if not Path('go').exists() and cfg.seed == 1:
        Path('began').touch()
        __import__('time').sleep(60)
"""
    script = write_script(tmp_path / "slow.py", "folder = Path", wait)
    script.write_text(script.read_text().replace("parse_args", "parse"))  # it is not asked: quicker
    command = [sys.executable, REPO / "records/ledger", "run", script, "--out", tmp_path]
    command += ["--seeds", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert "slow.py seed 0" in process.stderr.readline()
    deadline = time.monotonic() + 60
    while not (tmp_path / "began").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=30)[1]
    assert process.returncode == 1 and "Traceback" not in err, err
    assert "stopped; the same command goes on; what is done is kept in" in err
    (tmp_path / "go").touch()
    (first,) = (path.stat().st_mtime_ns for path in tmp_path.rglob("log.txt"))
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "slow.py seed 1: 1." in done.stderr, done.stderr
    assert first == min(path.stat().st_mtime_ns for path in tmp_path.rglob("log.txt"))


@pytest.mark.parametrize("command, words", [
    ("run a.py:val_tokens=2048 a.py", "a.py validates on val_tokens 65536, a.py:val_tokens=2048 "
     "on 2048: their losses do not compare"),
    ("run a.py a.py:muon_lr=5e-2", "settings of a.py"),  # what the preset says already
    ("run a.py a/a.py", "a/a.py has the script and the settings of a.py, but for comments"),
    ("run a.py a.py:seed=3", "seed is the ledger's; use --preset or --seeds"),
    ("run a.py a.py:lr=3", "a.py: --lr 3: no such"),
    ("run a.py:muon_lr", "'muon_lr' is no flag"),
    ("run folder", "folder: no script there"),
    ("run a.py bad.py", "bad.py: invalid syntax"),
    ("run a.py 2026-01-01_X", "2026-01-01_X/record.json: it has no keys"),
    ("run a.py --jobs 0", "--jobs: 0 is not a whole number"),
    ("run a.py --out a.py/out", "a.py/out"),
    ("verify folder", "folder has no record.json; give records/ or a record"),
    ("list folder/2026-01-01_X", "folder/2026-01-01_X has no records and no logs"),
    ("verify missing/2026-01-01_X", "missing: No such file"),
    ("diff a.py folder", "folder/train_gpt.py: No such file"),
    ("diff a.py notes.txt", "notes.txt has no source; give a script, or a log that has one"),
    ("file binary.bin", "binary.bin: refused: binary.bin: byte 1 is not text"),
    ("book folder --out site", "no records there, so no pages; give a folder that has")])
def test_bad_input_is_answered_in_a_line_and_nothing_is_written(
        command, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    other = SCRIPT.replace("import os\n", "import os  # of the machine\n")
    for name, text in (("a.py", SCRIPT), ("a/a.py", other), ("bad.py", "def parse_args(:\n"),
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


def test_what_needs_a_missing_package_says_so_first(tmp_path, monkeypatch, capsys):
    (tmp_path / "s.py").write_text(SCRIPT)
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    assert run(tmp_path / "s.py", "--out", tmp_path / "out") == 2
    assert "scipy.stats" in (err := capsys.readouterr().err)
    assert err.endswith("; pip install -r requirements-dev.txt\n")
    assert not (tmp_path / "out").exists()


def test_a_script_that_trains_when_it_is_imported_is_not_imported(tmp_path):
    (tmp_path / "s.py").write_text(f"open({str(tmp_path / 'trap')!r}, 'w')\n")
    assert runs.settings_of(tmp_path / "s.py", preset="pocket") == {"preset": "pocket"}
    assert not (tmp_path / "trap").exists()
