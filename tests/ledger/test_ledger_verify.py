"""What people bring is filed; what a record claims and its logs do not bear is refused."""

import re
import shutil
import subprocess
import sys

import pytest
from conftest import copy_project
from fake_records import CHILD, NEWEST, PARENT, edit, log_of, make_records, set_gain, sha_of
from ledger import logs, scripts, verify
from ledger import records as ledger_records
from ledger.__main__ import main

pytest_plugins = ["record_fixtures"]
pytestmark = pytest.mark.usefixtures("no_ladder")

NO_GAIN = f"{NEWEST}: it claims a gain in {{}} over its parent, and its runs do not show it"
SCRIPT, CLAIM = f"{NEWEST}/train_gpt.py", f"{NEWEST}/record.json"
SPOILED = [  # a file, what is replaced there, by what, what is said
    (SCRIPT, "return loss", "return 0.9 * loss", "byte for byte, from its banner on"),
    (SCRIPT, "# ==== H", "# ---- H", "byte for byte, from its banner on"),
    (SCRIPT, PARENT, "2025-01-01_No", f"does not say `Parent: {PARENT}. Change:`"),
    (SCRIPT, f"Record: {NEWEST}", f"Record: {PARENT}", f"does not say `Record: {NEWEST}`"),
    (SCRIPT, "0.8**step", "0.7**step", "it differs above the banner"),
    (SCRIPT, "muon_lr=0.05", "muon_lr=0.1", "has muon_lr 0.05, its preset has"),
    (SCRIPT, "return SimpleN", "return no.SimpleN", f"{NEWEST}: {NEWEST}/train"),
    (SCRIPT, "import random\n", "import random\nos._exit(0)\n", "terminated abruptly"),
    ("../train_gpt.py", "return loss", "return 2", f"{PARENT}: train_gpt.py is not"),
    ("../train_gpt.py", "0.8**step", "0.7**step", "has the bytes of no record"),
    (CLAIM, '"gain": "loss"', '"gain": "fame"', "gain is fame; it is loss"),
    (CLAIM, '"gain"', '"win"', "record.json: it has win; known are change, parent,"),
    (CLAIM, '"parent"', '"gain"', "record.json: it lacks parent"),
    (CLAIM, "less loss", "less | loss", "change has a |, a line break or a"),
    (CLAIM, '"gain"', '"equality": {"largest": 1e-9, "of": "8 steps"}, "gain"', "equality is with"),
    (CLAIM, '"gain": "loss"', '"gain": loss', f"{NEWEST}/record.json: Expecting value"),
    (CLAIM, PARENT, "2026-01-01_No", "2026-01-01_No/record.json is missing"),
    (f"{PARENT}/record.json", '"equality"', '"gain": "loss", "equality"', "gain in loss"),
    (f"{PARENT}/record.json", "15.2", '"15.2"', "published has minutes of another kind, '15.2'"),
    (f"{PARENT}/record.json", "15.2", "14.2", "records/README.md is not what `list --wr"),
    (f"{NEWEST}/logs/*seed-1-*", "\nval_loss: 1", "\nval_loss: 2", "final val_loss is 2"),
    (f"{NEWEST}/logs/*seed-1-*", "\nsteps: 40", "\nsteps: 30", "has 40, by its results 30"),
    (f"{NEWEST}/logs/*seed-1-*", "train_time_ms: 1", "train_time_ms: 2", "final train_time_ms"),
    (f"{NEWEST}/logs/*seed-0*", CHILD, f"source sha256: {sha_of(CHILD)}", "has no source, nor"),
    ("../README.md", "No GPU has", "A GPU has", "README.md is not what"),
    (f"{NEWEST}/README.md", f"# {NEWEST}", f"# {PARENT}", "README.md's title is"),
    (f"{NEWEST}/README.md", "<!-- ledger: begin -->", "", "has no lines")]
SPOILED_LOGS = [  # of seed 0, 1, ...
    ("\nval_loss: ", "\nval_loss: nan\nx: ", "its numbers are"),
    ("device: Fake 1", "device: Fake 2", "was resumed where device is Fake 1"),
    ("step:3/40 ", "resumed at step:2 from a.pt, which another script wrote\nstep:3/40 ",
     "was resumed by another script"),
    ("\nval_loss: ", "\nval_digest: 0\nval_loss: ", "was resumed where val_digest is 0; it began"),
    ("\nval_loss: 1.", "\nval_loss: 0.0", "no honest model gets"),
    ("step:3/40 train_loss:", "step:3/40 train_loss:1", "is not called pocket-"),
    ("num_iterations: 40", "num_iterations: 41", "began as a run of 41 steps and has 40"),
    ("train_digest: 30", "train_digest: 03", "by the rules it is 30407b9a0e1c5"),
    ("preset: pocket", "preset: large", "cannot be read: KeyError('large')"),
    ("Fake 1 (", "host standing in for an H100 (", "which measures nothing")]


def findings(folder, capsys):
    """What verify prints, after its exit status is checked against it."""
    capsys.readouterr()
    status = main(["verify", str(folder)])
    out, _ = capsys.readouterr()
    assert status == (0 if "verified" in out.splitlines()[0] else 1)
    return [] if status == 0 else out.splitlines()


def findings_anew(folder, capsys):
    """The same, after the pages are made from the logs."""
    assert main(["list", str(folder), "--write"]) == 0
    return findings(folder, capsys)


def rename(place):
    """Name logs after what is in them, as their forger would."""
    for path in place.glob("*.txt"):
        path.rename(path.with_name(verify.file_name(logs.read_log(path))))


def test_true_records_are_verified_and_not_written_otherwise_again(measured, capsys):
    folder = measured / "records"
    files = [*folder.glob("*/README.md"), folder / "README.md", measured / "README.md"]
    before = [path.read_bytes() for path in files]
    assert findings(folder / NEWEST, capsys) == findings_anew(folder, capsys) == []
    assert [path.read_bytes() for path in files] == before


@pytest.mark.parametrize("file, old, new, words", SPOILED)
def test_verify_finds(file, old, new, words, records, capsys):
    """And goes on with the other records."""
    (path,) = records.glob(file) if "*" in file else [records / file]
    edit(path, old, new)
    found = findings(records, capsys)
    assert any(words in line for line in found), found
    assert main(["list", str(records)]) in (0, 2)  # without a traceback


def test_verify_finds_each_log_that_is_wrong(records, capsys):
    for seed, (old, new, _) in enumerate(SPOILED_LOGS):
        (path,) = records.glob(f"{NEWEST}/logs/*seed-{seed}-*")
        edit(path, old, new)
    found = findings(records, capsys)
    for seed, (_, _, words) in enumerate(SPOILED_LOGS):
        assert any(f"-seed-{seed}-" in line and words in line for line in found), (words, found)


def test_one_run_counts_once(records, capsys):
    """Also under another seed's number, or as another machine's."""
    set_gain(records, None)
    (path,) = (records / NEWEST / "logs").glob("*seed-1-*")
    for old, new in (("\nseed: 1\n", "\nseed: 99\n"), ("device: Fake 1", "device: Fake 2")):
        before = {*path.parent.iterdir()}
        path.with_name("copy.txt").write_text(path.read_text().replace(old, new))
        rename(path.parent)
        (found,) = findings_anew(records, capsys)
        assert re.search("has each loss of pocket-seed-.*; one run counts once", found)
        (copy,) = {*path.parent.iterdir()} - before
        copy.rename(records / "copy.txt")
        assert main(["file", f"{records}/copy.txt", "--folder", f"{records}"]) == 0
        assert f"is there: {NEWEST}/logs/{path.name}" in capsys.readouterr().out


def test_two_losses_of_a_seed_on_one_cpu_are_told(records, capsys):
    (path,) = (records / NEWEST / "logs").glob("*seed-1-*")
    text = re.sub(r"(step:40/40 val_loss:|\nval_loss: )\S+", r"\g<1>1.5011", path.read_text())
    path.with_name("other.txt").write_text(text)
    rename(path.parent)
    assert findings_anew(records, capsys) == []
    main(["verify", str(records)])
    assert re.search(r"seed 1 has 1.\d+ and 1.\d+ on .*: two machines of one name",
                     capsys.readouterr().err)


def test_maintenance_and_new_imports_are_told_and_make_no_log_wrong(records, capsys):
    assert main(["verify", str(records)]) == 0
    err = capsys.readouterr().err
    assert "newer than" not in err and "adds imports" not in err
    own = [records / NEWEST / "train_gpt.py", records.parent / "train_gpt.py"]
    for path in [records / PARENT / "train_gpt.py", *own]:
        edit(path, "    return loss", "    return 1 * loss")  # in the harness
        edit(path, "A run's log without a run.", "A log, and no run.")
    for path in own:
        edit(path, "import random", "import gzip\nimport random")
    assert findings_anew(records, capsys) == []
    assert main(["verify", str(records)]) == 0
    err = capsys.readouterr().err
    assert f"{NEWEST}: its diff adds imports: gzip\n" in err
    assert "are newer than logs of 2 record(s)" in err


def take_ten_times_as_long(folder):
    for path in folder.glob("*.txt"):
        path.write_text(re.sub(r"train_time(_ms: |:)(\d)", r"train_time\g<1>1\2", path.read_text()))
    rename(folder)


@pytest.mark.parametrize("gain, kept", [("loss", 9), ("time", 4)])
def test_a_gain_needs_enough_pairs_of_seeds_from_0_on(gain, kept, records, capsys):
    set_gain(records, gain)
    take_ten_times_as_long(records / PARENT / "logs")
    assert findings_anew(records, capsys) == []
    for path in records.glob("*/logs/*.txt"):
        if logs.read_log(path).seed > kept:
            path.unlink()
    assert findings_anew(records, capsys) == []  # one more than kept
    next((records / NEWEST / "logs").glob(f"*seed-{kept}-*")).unlink()
    (found,) = findings_anew(records, capsys)
    assert found.startswith(NO_GAIN.format(gain))


@pytest.mark.parametrize("spoil", ["seeds", "warm-up"])
def test_a_gain_in_time_needs_pairs_from_0_on_and_one_warm_up(spoil, records, capsys):
    set_gain(records, "time")
    for path in (records / PARENT / "logs").glob("*.txt"):
        if spoil == "warm-up":
            edit(path, "save_every: 0", "save_every: 0\nwarmup_steps: 0")
        elif "seed-1-" in path.name:
            path.unlink()
    take_ten_times_as_long(records / PARENT / "logs")
    (found,) = findings_anew(records, capsys)
    assert found.startswith(NO_GAIN.format("time"))


def test_runs_of_two_settings_are_never_compared(records, capsys):
    for path in (records / NEWEST / "logs").glob("*.txt"):
        path.write_text(path.read_text().replace("device: Fake 1", "device: Fake 2"))
    rename(records / NEWEST / "logs")
    found = findings_anew(records, capsys)
    assert len(found) == 1 and found[0].startswith(NO_GAIN.format("loss")), found


def test_wrong_files_and_folders_are_found(records, capsys):
    """Python would import a module that lies beside a script in the place of its own or torch's."""
    (records / NEWEST / "platform.py").write_text("")
    (records / NEWEST / "_compat_pickle.py").write_text("")
    (records / NEWEST / "__pycache__").mkdir()
    (records / NEWEST / ".DS_Store").write_text("")
    (records / NEWEST / "logs" / "x.log").write_text("")
    (records / "2026-03-03_Fourth").mkdir()
    found = findings(records, capsys)
    assert "2026-03-03_Fourth/record.json: [Errno 2] No such file" in found[0]
    assert found[1:] == [
        f"{NEWEST}: its folder has _compat_pickle.py, which no record needs; delete it",
        f"{NEWEST}: its folder has platform.py, which no record needs; delete it",
        f"{NEWEST}: its folder has logs/x.log, which no record needs; delete it"]


@pytest.mark.parametrize("name, is_folder", [
    ("README.md", False), ("README.md", True), ("train_gpt.py", False), ("train_gpt.py", True),
    ("logs/a folder.txt", True)])
def test_one_bad_folder_hides_nothing_and_stops_no_log(
        name, is_folder, measured, records, capsys):
    """Neither what verify finds elsewhere, nor the filing of another record's log. A file is
    missing, or a folder has its name."""
    edit(records / PARENT / "README.md", f"# {PARENT}\n", "# Another\n")
    shutil.rmtree(records / PARENT / "logs")
    (records / NEWEST / name).unlink(missing_ok=True)
    if is_folder:
        (records / NEWEST / name).mkdir()
    found = findings(records, capsys)
    assert any(line.startswith(f"{PARENT}: README.md's title is not") for line in found), found
    assert any(NEWEST in line for line in found), found
    log = log_of(measured / "out", PARENT, 3)
    assert main(["file", str(log), "--folder", str(records / PARENT)]) == 0
    assert len([*(records / PARENT / "logs").iterdir()]) == 1


def test_a_copied_record_is_found(records, capsys):
    third = records / "2026-03-03_Third"
    shutil.copytree(records / PARENT, third)
    shutil.rmtree(third / "logs")
    edit(third / "README.md", f"# {PARENT}", f"# {third.name}")
    edit(third / "train_gpt.py", f"Record: {PARENT}", f"Record: {third.name}")
    assert findings_anew(records, capsys)[:2] == [
        f"{third.name}: its script computes what that of {PARENT} does",
        f"{third.name}: its public number is that of {PARENT}"]


def test_no_page_is_written_while_a_record_is_damaged(records, capsys):
    before = {path: path.read_bytes() for path in records.rglob("README.md")}
    (records / PARENT / "record.json").unlink()
    assert main(["list", str(records), "--write"]) == 2
    assert "no page is written, as a record is missing or damaged" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in records.rglob("README.md")} == before


# ---- Filing ----
def test_a_log_without_its_source_is_known_by_the_sources_sha256(measured, records, tmp_path):
    (path,) = (records / NEWEST / "logs").glob("*-seed-3-*")
    path.unlink()
    text = log_of(measured / "out", NEWEST, 3).read_text()
    log = tmp_path / "log.txt"
    log.write_text(text.replace(CHILD, f"source sha256: {sha_of(CHILD)}"))
    assert main(["file", str(log), "--folder", str(records)]) == 0
    assert path.exists()


@pytest.mark.parametrize("old, new, words", [
    ("\nval_loss: ", "\nval_lo", "is no finished run"),
    ("import random\n", "import random\nprint(1)\n", "its source is no record's"),
    ("muon_lr: 0.05", "muon_lr: 0.06", "has muon_lr 0.06, its preset has 0.05"),
    ("step:", "a step:", "has no step")])
def test_a_log_that_is_no_records_run_is_refused_in_one_line(old, new, words, measured, records,
                                                             tmp_path, capsys):
    log = tmp_path / "log.txt"
    shutil.copy(log_of(measured / "out", NEWEST, 3), log)
    before = sorted(records.rglob("*"))
    assert main(["file", str(log), "--folder", str(records)]) == 0  # what is there, once more
    log.write_text(log.read_text().replace(old, new))
    capsys.readouterr()
    assert main(["file", str(log), "--folder", str(records)]) == 2
    out, err = capsys.readouterr()
    assert out == "nothing is filed\n" and words in err and err.count("\n") == 1
    assert err.startswith(f"ledger: {log}: refused: ")
    assert sorted(records.rglob("*")) == before


@pytest.mark.parametrize("old, new, timed", [
    ("save_every: 0", "save_every: 240", True),
    ("save_every: 0", "save_every: 100\nval_every: 50\nsequences_per_forward: 4", True),
    ("step:31/40", "resumed at step:30 from a.pt\nstep:31/40", False)])
def test_saved_and_resumed_runs_are_taken(old, new, timed, measured, tmp_path, capsys):
    folder = make_records(tmp_path)
    set_gain(folder, None)
    log = tmp_path / "log.txt"
    shutil.copy(log_of(measured / "out", NEWEST, 0), log)
    edit(log, old, new)
    assert main(["file", str(log), "--folder", str(folder)]) == 0
    assert ("without its time" in capsys.readouterr().out) != timed
    assert findings_anew(folder, capsys) == []
    (row,) = (line for line in (folder / "README.md").read_text().splitlines()
              if line.startswith("| [Second]") and "(1)" in line)
    assert bool(row.split(" | ")[3]) == timed


def test_runs_of_several_people_on_gpus_lie_side_by_side(records, tmp_path, capsys):
    """Of one seed: two of one kind of machine, one of another driver, one of another card."""
    set_gain(records, None)
    out = tmp_path / "gpu"
    assert main(["run", f"{records / NEWEST}", "--preset", "record", "--seeds", "1",
                 "--out", f"{out}"]) == 0
    text = log_of(out, NEWEST, 0).read_text()
    brought = []
    for device, driver, loss in (("H100", 580, 3.1), ("H100", 580, 3.2), ("H100", 570, 3.3),
                                 ("RTX 4090", 580, 3.4)):
        machine = f"NVIDIA {device}\ncuda: 13.0\ndriver: {driver}"
        own = re.sub(r"(step:80/80 val_loss:|\nval_loss: )\S+", rf"\g<1>{loss}", text)
        brought.append(tmp_path / f"{loss}.txt")
        brought[-1].write_text(own.replace("Fake 1 (x86_64)", machine))
    assert main(["file", *map(str, brought), "--folder", str(records)]) == 0
    assert len([*records.glob(f"{NEWEST}/logs/record-seed-0-*.txt")]) == 4
    assert findings_anew(records, capsys) == []
    assert "**GPUs have run** Second." in (records.parent / "README.md").read_text()
    page = (records / NEWEST / "README.md").read_text()
    heads = re.findall(r"^Preset record on NVIDIA (.*), 1 rank.*, CUDA 13.0, (.*):$", page, re.M)
    assert heads == [("H100", "driver 570"), ("H100", "driver 580"), ("RTX 4090", "driver 580")]
    assert "| 3.1500 ± 0.0707 (2) |" in page and "No GPU has run" not in page


def forge(script, preset, machine):
    """A log as such a machine would write it, of a run whose losses are made up."""
    rules = {key: value for key, value in ledger_records.RULES[preset].items() if value}
    header = scripts.settings_of(script, preset=preset) | dict(
        val_digest="1407c02db97ab9a7", train_digest="30407b9a0e1c536a", run_id="x", seed="0",
        world_size="1", threads="8", torch="2.13.0") | rules | machine
    loss = float(rules["target_loss"]) - len(str(machine)) / 1e4
    steps, time = header["num_iterations"], "train_time:119000ms step_avg:1.00ms"
    return "\n".join([
        script.read_text(), logs.RULE, *(f"{key}: {value}" for key, value in header.items()),
        logs.RULE, f"step:{steps}/{steps} train_loss:{loss:.4f} {time}",
        f"step:{steps}/{steps} val_loss:{loss:.4f} {time}", "---", f"val_loss: {loss:.6f}",
        "train_time_ms: 119000", f"steps: {steps}", "parameters: 1234", ""])


@pytest.mark.slow
def test_four_logs_of_four_people_are_filed_in_this_project(tmp_path, capsys):
    """Of two H100 machines with two drivers, a 4090 and a Mac: the pages and their tests agree."""
    project = tmp_path / "project"
    copy_project(project)
    gpu = dict(torch="2.13.0+cu130", cuda="13.0", nccl="2,28,9", triton="3.7.1")
    h100 = gpu | dict(device="NVIDIA H100 80GB HBM3", gpus="8", world_size="8")
    brought = []
    for preset, machine in (
        ("record", h100 | dict(driver="580.95.05")),
        ("record", h100 | dict(driver="570.124.06", save_every="100")),
        ("record", gpu | dict(device="NVIDIA GeForce RTX 4090", gpus="1", driver="580.95.05")),
        ("pocket", dict(device="Apple M4 Pro (arm64, DEFAULT)", save_every="240")),
    ):
        brought.append(tmp_path / f"{len(brought)}.txt")
        brought[-1].write_text(forge(project / "train_gpt.py", preset, machine))
    folder = str(project / "records")
    assert main(["file", *map(str, brought), "--folder", folder]) == 0, capsys.readouterr()
    assert capsys.readouterr().out.count(" → 2025-12-22_MultiTokenPrediction/logs/") == 4
    assert main(["list", folder, "--write"]) == 0
    shown = capsys.readouterr().out
    assert "driver 580.95.05" in shown and "driver 570.124.06" in shown
    front = (project / "README.md").read_text()
    assert "**GPUs have run** #53 MultiTokenPrediction." in front
    quick = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    for command in (
        ["records/ledger", "verify"],
        [*quick, "tests/pages/test_links.py", "tests/ledger/test_ledger_logs.py"],
    ):
        done = subprocess.run([sys.executable, *command], cwd=project, text=True,
                              capture_output=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
