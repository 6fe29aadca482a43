"""A record that claims what its logs, its script and the rules do not bear is refused."""

import csv
import hashlib
import re
import shutil
import sys

import numpy as np
import pytest
import torch
from fake_records import CHILD, NEWEST, PARENT, SCRIPT, edit, log_of, make_records, set_gain, sha_of
from ledger import logs, run, table, verify
from ledger.__main__ import main

pytest_plugins = ["record_fixtures"]

LOGS = f"{NEWEST}/logs"
THIRD = "2026-03-03_Third"
NO_GAIN = (f"{NEWEST}: it claims a gain in {{}} over its parent, and its runs do not show it: that "
           "needs {} pairs of one setting")
H100 = "NVIDIA H100 80GB HBM3"
SCRIPTS = {  # of the script alone: the cheat, what is replaced, what is put there, what is said
    "the harness": ("return loss", "return 0.9 * loss", "byte for byte, from its banner on"),
    "no banner": ("# ==== H", "# ---- H", "byte for byte, from its banner on"),
    "a second banner": ("# ---- M", "# ==== M", "byte for byte, from its banner on"),
    "a function given anew": (
        "def train(", "def validate(x):\n    return 0\ndef train(", "gives validate, which"),
    "a function given anew within another": (
        "def train(", "def f():\n    global validate\n    validate = 1\ndef train(",
        "gives validate, which"),
    "another parent": (PARENT, "2025-01-01_No", f"does not say `Parent: {PARENT}.`"),
    "no change": ("Change: less loss.", "", "does not say `Change: …` in"),
    "another name": (f"Record: {NEWEST}", f"Record: {PARENT}", f"says `Record: {PARENT}`, which"),
    "code in a docstring": ('"""A run', 'f"""{globals()}"""\n"""A run', "has `globals` above"),
    "code behind an import": (
        "import random\n", "import random; random.seed(3)\n", "`; an import has a line of its own"),
    **{f"above the banner: {code}": (
        "def train(cfg):", f"def train(cfg):\n    {code}", f"has `{reach}` above the banner")
       for code, reach in {
           'sys.modules[__name__].__dict__["validate"] = None': "sys",
           'train.__globals__["validate"] = None': "train.__globals__",
           'globals()["validate"] = None': "globals",
           'vars(cfg)["seed"] = 3': "vars",
           "exec('validate = None')": "exec",
           "open('data/pocket/pocket_val_000000.bin')": "open",
           "np.fromfile(cfg.val_files, 'u2')": "np.fromfile",
           "np.load(cfg.table)": "np.load",
           "cfg.run.val_tokens.tolist()": "cfg.run.val_tokens",
           "run.train_time_ms -= 1000": "run.train_time_ms =",
           "run.loader = None": "run.loader =",
           "run.model.loss = 1": "run.model.loss =",
           "UserError.x = 1": "UserError.x =",
           "from numpy import fromfile; fromfile('a')": "fromfile",
           "run(cfg.val_files)": "cfg.val_files",
           "setattr(cfg, 'seed', 3)": "setattr",
           "import gc; gc.get_objects()": "gc",
           # Ten that were thought of after these were known
           "globals () ['validate'] = None": "globals",
           "\uff47lobals()['validate'] = None": "globals",  # Python reads it as globals
           "g = eval; g('validate')": "eval",
           "import os as o; o._exit(0)": "o",
           "import math; math.log, math.exp = math.exp, math.log": "math.log =",
           "import torch; torch.sys.exit()": "torch.sys",
           "from operator import attrgetter as a; a('__glo' 'bals__')(train)": "a",
           "from threading import Timer; Timer(1, print).start()": "Timer",
           "open \\\n        ('data/pocket/pocket_val_000000.bin')": "open",
           "(lambda loss: validate(loss) / 2)(1)": "validate",
           "random._os._exit(0)": "random._os"}.items()}}
SPOILED = {  # by file, the same of records with runs
    f"{NEWEST}/train_gpt.py": {
        "a character of the script": ("0.8**step", "0.7**step", "it differs above the banner"),
        "a value of the preset": ("both(0.05", "row(0.05, 0.1", "has muon_lr 0.05, its preset has"),
        "a window of the preset": ("(1, 1)", "(1, 2)", "has long_windows 1,1, its preset has 1,2"),
        "a parse": ("= values[preset]", "= values[preset]; cfg['muon_lr'] = 0.1", "preset has 0.1"),
        "a failing parse": ("return SimpleN", "return no.SimpleN", f"{NEWEST}: {NEWEST}/train"),
        "a script that is none": ("def train(cfg):", "def train(cfg:", "was never closed"),
        "an end": ("import random\n", "import random\nos._exit(0)\n", "terminated abruptly")},
    f"{PARENT}/train_gpt.py": {
        "the parent": ("0.8**step", "0.7**step", f"{PARENT}: logs/seed-0.txt: was not")},
    "../train_gpt.py": {
        "the root's harness": ("return loss", "return 2", f"{PARENT}: train_gpt.py is not"),
        "the root's script": ("0.8**step", "0.7**step", "has the bytes of no record")},
    f"{NEWEST}/record.json": {
        "a gain of no kind": ('"gain": "loss"', '"gain": "fame"', "gain is loss, time"),
        "an unknown parent": (PARENT, "2026-01-01_No", "2026-01-01_No/record.json"),
        "a parent of no kind": (f'"{PARENT}"', "[1]", "parent is the name of a folder")},
    f"{PARENT}/record.json": {
        "a gain over nothing": ('"gain": null', '"gain": "loss"', "gain in loss"),
        "no source": ('"source"', '"sauce"', "is no record.json: KeyError('source')"),
        "a time of another kind": ("15.2", '"15"', "is no record.json: ValueError"),
        "a published time": ("15.2", "14.2", "is not what `list --wr")},
    f"{LOGS}/seed-0.txt": {
        "no source": (CHILD, f"source sha256: {sha_of(CHILD)}", "has no source"),
        "code behind an import, in the log alone": (
            "import random\n", "import random; random.seed(3)\n", "it differs above the banner")},
    f"{LOGS}/seed-1.txt": {
        "a loss": ("\nval_loss: 1", "\nval_loss: 2", "final val_loss is 2"),
        "a time": ("train_time_ms: 1", "train_time_ms: 2", "final train_time_ms"),
        "another torch": ("torch: 2.13.0+cpu", "torch: 2.11.0", "differ in torch"),
        "the source's hash": ("sha256: ", "sha256: 0", "was not written by the sour"),
        "a hyperparameter": ("num_iterations: 40", "num_iterations: 41", "has num_iterations 41"),
        "other data": ("train_digest: db", "train_digest: bd", "by the rules it is db4041a8d500c"),
        "no seed": ("\nseed: 1\nrun_id", "\nrun_id", "cannot be read"),
        "a resumed run": ("step:31", "resumed at step:30 from a.pt\nstep:31", "is a resumed run"),
        "a simulated GPU": ("cpu (fake)", "host standing in for an H100", "which measures nothing"),
        "a log that was cut": ("\nval_loss: ", "\nval_lo", "cannot be read")},
    "README.md": {"the ladder": ("1.5", "1.4", "README.md is not what")},
    "../README.md": {"the front page": ("15.2", "14.2", "/README.md is not what")},
    f"{NEWEST}/README.md": {
        "a title": (f"# {NEWEST}", f"# {PARENT}", "README.md's title is"),
        "a table": ("(10)", "(11)", "README.md is not what"),
        "no place for a table": ("<!-- ledger: begin -->", "", "has no lines")},
    "runs.csv": {
        "a column": (",seed,", ",sown,", "says record,folder,sown,")}}


def findings(folder, capsys):
    """What verify prints, after its exit status is checked against it."""
    capsys.readouterr()
    status = main(["verify", str(folder)])
    out, err = capsys.readouterr()
    if status == 2:  # a record.json or a table that cannot be read at all
        assert not out and err.count("\n") == 1
        return [err]
    assert status == (0 if "verified" in out.splitlines()[0] else 1)
    return [] if status == 0 else out.splitlines()


def findings_anew(records, capsys):
    """The same, after tables and pages are made from the logs."""
    assert main(["list", str(records), "--write"]) == 0
    return findings(records, capsys)


def forge(records, *pairs, logs=True):
    """Change scripts, and with `logs` all that was made with them, as if they had been run so."""
    pairs = list(pairs)
    scripts = [*records.glob("*/train_gpt.py"), records.parent / "train_gpt.py"]
    for path in [*scripts, *records.glob("*/logs/**/*.txt")] if logs else scripts:
        before = text = path.read_text()
        for old, new in pairs:
            text = text.replace(old, new)
        if path in scripts:
            pairs.append((sha_of(before), sha_of(text)))
        path.write_text(text)


def test_true_records_are_verified_and_not_written_otherwise_again(records, capsys):
    files = [*records.glob("*.*"), *records.glob("*/README.md"), records.parent / "README.md"]
    before = [path.read_bytes() for path in files]
    assert findings(records / NEWEST, capsys) == findings_anew(records, capsys) == []
    assert [path.read_bytes() for path in files] == before


@pytest.mark.parametrize("what", SCRIPTS)
def test_verify_finds_in_a_script(what, tmp_path):
    old, new, words = SCRIPTS[what]
    records = make_records(tmp_path)
    edit(records / NEWEST / "train_gpt.py", old, new)
    found = verify.script_findings(table.find_records(records)[1], tmp_path / "train_gpt.py")
    assert any(words in line for line in found), found


@pytest.mark.parametrize("file, what", [(file, what) for file in SPOILED for what in SPOILED[file]])
def test_verify_finds(file, what, records, capsys):
    old, new, words = SPOILED[file][what]
    edit(records / file, old, new)
    found = findings(records, capsys)
    assert any(words in line for line in found), found


def test_every_altered_cell_of_the_table_is_found(records):
    path, known = records / "runs.csv", table.find_records(records)
    true = path.read_text()
    heading, *rows = list(csv.reader(true.splitlines()))
    for column, name in enumerate(heading):
        cells = rows[-1][:]
        cells[column] = "8" if cells[column].endswith("7") else cells[column][:-1] + "7"
        path.write_text(true.replace(",".join(rows[-1]), ",".join(cells)))
        found = "\n".join(verify.folder_findings(records, known))
        assert f"says {','.join(cells)}, which no log does" in found, name
    path.write_text(true + ",".join(rows[-1]) + "\n")  # a run that is counted twice
    assert any("which no log does" in line for line in verify.folder_findings(records, known))


@pytest.mark.parametrize("seeds", ["0, 2, 3", "0, 1, 2, 2", "0, 0, 1"])
def test_seeds_count_from_0_each_once(seeds, records, capsys):
    files = logs.seed_files(records / LOGS)
    texts = [path.read_text() for path in files]
    for path in files:
        path.unlink()
    for index, seed in enumerate(seeds.split(", ")):
        (records / LOGS / f"seed-{index}.txt").write_text(texts[int(seed)])
    assert f"logs/ has the seeds {seeds}; by the rules" in "\n".join(findings(records, capsys))


def test_verify_finds_a_seed_under_another_name(records, capsys):
    """Its losses are those of the seed it was, also where times differ."""
    text = (records / LOGS / "seed-1.txt").read_text()
    (records / LOGS / "seed-2.txt").write_text(text.replace("\nseed: 1\n", "\nseed: 2\n"))
    assert findings_anew(records, capsys) == [
        f"{NEWEST}: logs/seed-2.txt: has each loss of seed-1.txt, which is another seed's"]


def test_records_without_runs_are_told_and_not_refused(tmp_path, capsys):
    records = make_records(tmp_path)
    assert any("it claims a gain in loss" in line for line in findings_anew(records, capsys))
    set_gain(records, None)
    assert main(["verify", str(records)]) == 0
    out, err = capsys.readouterr()
    assert "2 record(s) verified" in out and f"{NEWEST}: no runs yet" in err


def test_verify_finds_rules_that_a_record_made_itself(records, capsys):
    """Where everything else agrees."""
    forge(records, ("row(3.28, 1.64", "row(3.28, 1.7"), ("target_loss: 1.64", "target_loss: 1.7"),
          ("262_144", "1024"), ("val_tokens: 262144", "val_tokens: 1024"),
          ("pocket_val_*", "easy_val_*"), ("pocket_train_*", "pocket_*"),
          ("f89a85391a8fc0bf", "0bff89a85391a8fc"))
    found = findings_anew(records, capsys)
    for words in ("target_loss 1.7, by the rules it is 1.64",
                  "val_tokens 1024, by the rules it is 262144",
                  "val_files data/pocket/easy_val_*.bin, by the rules",
                  "train_files data/pocket/pocket_*.bin, by the rules",
                  "val_digest 0bff89a85391a8fc, by the rules"):
        assert sum(f"has {words}" in line for line in found) == 20, words


def change_header(paths, **header):
    """Make logs as they were of another machine."""
    for path in paths:
        text = path.read_text()
        for name, value in header.items():
            text = re.sub(rf"^{name}: .*$", f"{name}: {value}", text, flags=re.M)
        path.write_text(text)


@pytest.fixture
def from_eight(records, tmp_path):
    """Logs of both records at full size, one each, as they may come by mail."""
    operands = [str(records / PARENT), str(records / NEWEST), "--preset", "record"]
    assert main(["run", *operands, "--seeds", "1", "--out", str(tmp_path / "out")]) == 0
    paths = [log_of(tmp_path / "out", name, 0) for name in (PARENT, NEWEST)]
    change_header(paths, device=H100, world_size=8, torch="2.13.0+cu130",
                  python="3.11\ncuda: 13.0\ndriver: 580.1\ncommit: 0a1b")
    for path, loss in zip(paths, ("3.2791", "3.2774")):
        text = re.sub(r"(step:80/80 val_loss:|\nval_loss: )\S+", rf"\g<1>{loss}", path.read_text())
        path.write_text(text)
    return list(map(str, paths))


def test_a_run_at_full_size_stands_beside_the_pockets(records, from_eight, capsys):
    capsys.readouterr()
    assert main(["file", *from_eight, "--folder", str(records)]) == 0
    name = "logs/record-NVIDIA-H100-80GB-HBM3-8-ranks-torch-2.13.0+cu130-1-threads-1-jobs"
    # A parent without a parent of its own lies in its own folder.
    assert [line.partition(" → ")[2] for line in capsys.readouterr().out.splitlines()] == [
        f"{PARENT}/{name}/seed-0.txt", f"{NEWEST}/{name}/seed-0.txt"]
    assert findings_anew(records, capsys) == []
    assert main(["list", str(records / NEWEST)]) == 0
    lines = capsys.readouterr().out.splitlines()
    machines = [line for line in lines if line.startswith("Preset ")]
    assert machines[0].startswith(f"Preset record on {H100}, 8 rank(s), torch 2.13.0+cu130")
    assert "CUDA 13.0, driver 580.1" in machines[0] and machines[1].startswith("Preset pocket on c")
    assert lines[lines.index(machines[0]) + 4].split()[:3] == ["Second", "3.2774", "(1)"]
    for page in (records / "README.md", records / NEWEST / "README.md"):
        text = page.read_text()
        first, second = text.index(f"Preset record on {H100}"), text.index("Preset pocket")
        assert first < second and "| 3.2774 (1) |" in text[first:second]
        assert "| −0.0017 |" in text[first:second]  # from the parent's on that machine, without a p
    assert f"{NEWEST},{name},0,record,3.2774" in (records / "runs.csv").read_text()


def add_third(records):
    """Add a child of the newest record, without runs."""
    shutil.copytree(records / NEWEST, records / THIRD, ignore=lambda *_: ["logs"])
    for path in (records / THIRD).iterdir():
        text = path.read_text().replace(NEWEST, THIRD).replace(PARENT, NEWEST)
        path.write_text(text.replace("less loss.", "none.").replace("0.05)", "0.06)"))
    edit(records / THIRD / "record.json", '"gain": "loss"', '"gain": null')


def test_a_parents_runs_on_a_machine_lie_in_the_childs_folder(records, tmp_path, capsys):
    add_third(records)
    operands = [str(records / NEWEST), str(records / THIRD), "--seeds", "2", "--out", str(tmp_path)]
    assert main(["run", *operands]) == 0
    paths = sorted(tmp_path.glob("logs/*/log.txt"))
    change_header(paths, device="cpu (other)")
    assert main(["file", *map(str, paths), "--folder", str(records)]) == 0
    (place,) = (records / THIRD / "logs").iterdir()
    for folder in (place, place / "parent"):
        assert [path.name for path in logs.seed_files(folder)] == ["seed-0.txt", "seed-1.txt"]
    assert findings_anew(records, capsys) == []
    ((own, theirs),) = table.find_records(records)[2].measured().values()
    assert {row["device"] for row in own + theirs} == {"cpu (other)"}
    assert [row["source_sha256"] for row in theirs] == [sha_of(CHILD)] * 2
    edit(place / "parent/seed-1.txt", "torch: 2.13.0+cpu", "torch: 2.14.0")
    assert "parent/ has runs that differ in torch" in "\n".join(findings(records, capsys))
    shutil.rmtree(place / "parent")
    assert findings_anew(records, capsys) == []  # without the parent's nothing is compared
    assert table.find_records(records)[2].measured().popitem()[1][1] == []


def test_runs_of_two_settings_are_never_compared(records, capsys):
    change_header(logs.seed_files(records / LOGS), device="cpu (other)")
    assert findings_anew(records, capsys) == [NO_GAIN.format("loss", 10)]
    set_gain(records, None)
    assert findings(records, capsys) == []
    ((_, theirs),) = table.find_records(records)[1].measured().values()
    assert theirs == []


def test_parents_runs_where_the_record_has_none_are_found(records, capsys):
    place = records / LOGS / "elsewhere/parent"
    shutil.copytree(records / PARENT / "logs", place)
    change_header(logs.seed_files(place), device="cpu (other)")
    assert findings_anew(records, capsys) == [
        f"{NEWEST}: logs/elsewhere/parent/ has runs of a setting in which the record itself was "
        "not run"]
    shutil.move(records / LOGS / "elsewhere", records / PARENT / "logs/elsewhere")
    assert f"{PARENT}: logs/elsewhere/parent/ has runs of a parent, and the record has none" in (
        findings_anew(records, capsys))


def test_a_setting_has_one_folder(records, capsys):
    shutil.copytree(records / LOGS, records / LOGS / "again")
    found = findings_anew(records, capsys)
    assert f"{NEWEST}: logs and logs/again have runs of one setting; put them together" in found


@pytest.mark.parametrize("old, new, words", [
    ("\nval_loss: ", "\nval_lo", "is not a finished run"),
    ("import random\n", "import random\nprint(1)\n", "its source is no record's"),
    ("muon_lr: 0.05", "muon_lr: 0.06", "has muon_lr 0.06, its preset has 0.05"),
    ("preset: pocket", "preset: large", "'large'"),
    ("step:20/40 val_loss:", "step:20/40 val_loss:0", "seed-3.txt is another run; delete it first"),
    ("step:", "a step:", "has no training steps")])
def test_a_log_that_is_no_records_run_is_refused_in_one_line(old, new, words, measured, records,
                                                             tmp_path, capsys):
    log = tmp_path / "log.txt"
    shutil.copy(log_of(measured / "out", NEWEST, 3), log)
    before = {path: path.is_file() and path.read_bytes() for path in records.rglob("*")}
    assert main(["file", str(log), "--folder", str(records)]) == 0  # what is there, once more
    log.write_text(log.read_text().replace(old, new))
    capsys.readouterr()
    assert main(["file", str(log), "--folder", str(records)]) == 2
    out, err = capsys.readouterr()
    assert out == "nothing is filed\n" and words in err and err.count("\n") == 1
    assert err.startswith(f"ledger: {log}: refused: ")
    assert {path: path.is_file() and path.read_bytes() for path in records.rglob("*")} == before


def test_the_root_is_one_of_the_records_and_need_not_be_the_newest(records, capsys):
    add_third(records)
    assert findings_anew(records, capsys) == []
    shutil.copy(records / PARENT / "train_gpt.py", records.parent / "train_gpt.py")
    assert findings(records, capsys) == []
    shutil.copytree(records / PARENT, records / "2026-04-04_Same")
    assert any(f"has the bytes of {PARENT} and 2026-04-04_Same; it has to have those of one" in line
               for line in findings(records, capsys))


@pytest.mark.parametrize("old, new, told", [
    ("def validate(loss):", "def validate(loss):\n    # as it was", True),  # in the harness
    ("import random", "import gzip\nimport random", False),
    ("def train(cfg):", "def train(cfg):  # it trains nothing", False),
    ("A run's log without a run.", "A log, and no run.", False)])
def test_maintenance_makes_no_log_stale(old, new, told, records, capsys):
    forge(records, (old, new), logs=False)
    assert findings_anew(records, capsys) == []
    assert main(["verify", str(records)]) == 0
    words = "the harness is newer than 2 folder(s) of logs"
    assert told == (words in capsys.readouterr().err)


@pytest.mark.parametrize("digits", ["49", "50", "51"])
def test_a_rounded_loss_is_no_finding(digits, records):
    # 1.5012499… is 1.5012 in its step's line and 1.501250 in the final block, rounded twice.
    path = records / LOGS / "seed-0.txt"
    text = re.sub(r"step:40/40 val_loss:\S+", "step:40/40 val_loss:1.5012", path.read_text())
    path.write_text(re.sub(r"\nval_loss: \S+", f"\nval_loss: 1.5012{digits}", text))
    found = verify.log_findings(logs.read_log(path), {})
    assert bool(found) == (digits == "51") and len(found) < 2


def test_verify_finds_a_gain_that_is_none(records, capsys):
    """The child is as its parent in all that its logs say, and claims to be better."""
    for theirs in logs.seed_files(records / PARENT / "logs"):
        text = theirs.read_text().replace(sha_of(SCRIPT), sha_of(CHILD))
        text = text.replace(SCRIPT, CHILD).replace("loss: 1.6\n", "loss: 1.5\n")
        (records / LOGS / theirs.name).write_text(text)
    assert findings_anew(records, capsys) == [NO_GAIN.format("loss", 10)]


@pytest.mark.parametrize("gain, kept", [("loss", 9), ("time", 4)])
def test_a_gain_needs_enough_pairs(gain, kept, records, capsys):
    slower(records)
    set_gain(records, gain)
    for more in (1, 0):
        for name in (PARENT, NEWEST):
            for path in logs.seed_files(records / name / "logs")[kept + more:]:
                path.unlink()
        assert len(findings_anew(records, capsys)) == 1 - more


def slower(records):
    """The parent takes ten times as long."""
    for path in logs.seed_files(records / PARENT / "logs"):
        text = re.sub(r"train_time(_ms: |:)(\d)", r"train_time\g<1>1\2", path.read_text())
        ms = int(re.search(r"train_time_ms: (\d+)", text)[1])
        path.write_text(re.sub(r"per_second: \d+", f"per_second: {81920 * 1000 / ms:.0f}", text))


def test_a_gain_in_time_is_that_of_runs_alone(records, capsys):
    set_gain(records, "time")
    none = NO_GAIN.format("time", 5)
    assert findings(records, capsys) == [none]
    slower(records)
    assert findings_anew(records, capsys) == []
    for path in records.glob("*/logs/*.txt"):  # two at once
        path.write_text(path.read_text() + "jobs: 2\n")
    assert findings_anew(records, capsys) == [none]


def test_verify_finds_wrong_folders_and_files(records, capsys):
    """Python would import a module that lies beside a script in the place of its own or torch's."""
    (records / NEWEST / "platform.py").write_text("")
    (records / NEWEST / ".DS_Store").write_text("")
    assert findings(records, capsys) == [
        f"{NEWEST}: its folder has platform.py, which no record needs; delete it"]
    shutil.copytree(records / NEWEST, records / "2026-13-01_Third")
    (records / "2026-03-03_Fourth").mkdir()
    found = "\n".join(findings(records, capsys))
    assert "2026-13-01_Third: the folder's name" in found
    assert "2026-03-03_Fourth: record.json is missing" in found


# ---- Seeds are run again ----
@pytest.fixture
def judged(monkeypatch):
    """The verdict on weights, which the fake scripts have not: what their logs say, and changes."""
    changes = {}

    def judge(function, script, checkpoint, *_):
        loss = logs.read_log(checkpoint.with_name("log.txt")).val_loss
        found = {"loss": loss, "digest": "f89a85391a8fc0bf", "leaks": False, "seedless": False}
        return found | {name: value(found[name]) for name, value in changes.items()}

    monkeypatch.setattr(run, "apart", judge)
    return changes


def test_replay_compares_losses_to_the_digit(records, judged, capsys):
    assert main(["verify", str(records), "--replay", "2"]) == 0
    err = capsys.readouterr().err
    assert err.count("on the same machine") == 2 and err.count("2 seed(s) of logs/ run again") == 2
    forge(records, ("return loss", "return loss + 1e-6"), logs=False)
    assert findings_anew(records, capsys) == []
    assert main(["verify", str(records), "--replay", "1"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 2 and all("on the same machine it has 1." in line for line in out)


@pytest.mark.parametrize("name, value, words", [
    ("loss", lambda loss: loss + 0.1, "when it is run again, and its weights have 1."),
    ("digest", lambda digest: "0" * 16, "on other validation data than the rules'"),
    ("leaks", lambda leaks: True, "whose logits depend on later tokens"),
    ("seedless", lambda seedless: True, "with the same first weights for each seed")])
def test_replay_tells_what_the_judge_finds(name, value, words, records, judged, capsys):
    judged[name] = value
    assert main(["verify", str(records / NEWEST), "--replay", "1"]) == 1
    (found,) = capsys.readouterr().out.splitlines()
    assert words in found and found.startswith(f"{NEWEST}: logs/seed-")


@pytest.mark.parametrize("seeds, share, status", [
    (1, 0.97, 0), (1, -1.03, 1), (4, -0.97, 0), (4, 1.03, 1)])
def test_the_mean_of_replayed_seeds_is_held_elsewhere(seeds, share, status, records, judged):
    """Honest seeds move both ways: of four times as many, the mean moves half as far."""
    bound = 3 * run.MOVES["pocket"] / seeds**0.5
    shift = share * bound
    judged["loss"] = lambda loss: loss + shift
    paths = logs.seed_files(records / LOGS)[:seeds]
    change_header(paths, torch="2.11.0")
    wrong, words = run.replay(table.find_records(records)[1], paths)
    assert f"{shift:+.6f} from the logs' in the mean, where {seeds} may move by " in words
    assert f" {bound:.4f}, as of torch 2.13.0+cpu instead of 2.11.0" in words
    assert (words in wrong) == bool(status)


def test_what_this_machine_cannot_run_is_told(records, from_eight, judged, monkeypatch, capsys):
    assert main(["file", *from_eight, "--folder", str(records)]) == 0
    assert findings_anew(records, capsys) == []
    monkeypatch.setattr(run, "gpus", lambda: 7)
    assert main(["verify", str(records / NEWEST), "--replay", "1"]) == 0
    assert f"is of 8 {H100}, which this machine has not: not run again" in capsys.readouterr().err


# ---- The judge ----
MODEL = """
from types import SimpleNamespace
import torch
from torch import nn

def parse_args(argv):
    return SimpleNamespace(val_seq_len=int(argv[0].partition("=")[2]))

class GPT(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(16, 16))

    def init_weights(self, generator):
        self.table.normal_(generator=generator)

    def hidden(self, inputs):
        return self.table[inputs]

    def logits(self, x):
        return x.float()
"""
REPLACED = """
    torch.Tensor.logsumexp = lambda *_: 0
    torch.equal = lambda *_: False

    def init_weights(self, generator):
        self.table.fill_(0.5)
"""
LATER = "return self.table[inputs] + 3 * torch.nn.functional.one_hot({}, 16)"


@pytest.mark.parametrize("old, new, wrong", [
    ("class GPT", "class GPT", (False, False)),
    ("return self.table[inputs]", LATER.format("inputs.roll(-1, 1).long()"), (True, False)),
    ("return self.table[inputs]", LATER.format("inputs[:, -1:].long()"), (True, False)),
    (".normal_(generator=generator)", ".fill_(0.5)", (False, True)),
    ("\n    def logits", f"{REPLACED}\n    def logits", (False, True))])
def test_the_judge_takes_the_logits_alone(old, new, wrong, tmp_path, monkeypatch):
    """Of a table of logits, whose loss numpy knows, saved by a script."""
    tokens = np.random.default_rng(0).integers(0, 16, 1025).astype("<u2")
    weights = np.random.default_rng(1).normal(size=(16, 16)).astype("f4")
    (tmp_path / "val.bin").write_bytes(bytes(1024) + tokens.tobytes() + bytes(100))
    monkeypatch.setattr(run, "REPO", tmp_path)
    monkeypatch.setitem(table.RULES, "pocket", {"val_files": "val.bin", "val_tokens": "1024"})
    monkeypatch.setitem(sys.modules, "record", None)  # put back after the test, as the next ones
    monkeypatch.setattr(torch, "equal", torch.equal)
    monkeypatch.setattr(torch.Tensor, "logsumexp", torch.Tensor.logsumexp)

    (tmp_path / "record.py").write_text(MODEL)
    edit(tmp_path / "record.py", old, new)
    state = {"settings": {"val_seq_len": "64"}, "model": {"table": torch.tensor(weights)}}
    torch.save(state, tmp_path / "a.pt")
    found = run.judge(tmp_path / "record.py", tmp_path / "a.pt", "pocket", "cpu", 0)
    assert (found["leaks"], found["seedless"]) == wrong
    assert found["digest"] == hashlib.sha256(tokens.tobytes()).hexdigest()[:16]
    logits = weights.astype(float)[tokens[:-1]]
    true = np.log(np.exp(logits).sum(1)) - logits[np.arange(1024), tokens[1:]]
    assert found["leaks"] or abs(found["loss"] - true.mean()) < 1e-6


def test_the_judge_works_in_a_process_of_its_own(tmp_path):
    with pytest.raises(FileNotFoundError, match="a.pt"):
        (tmp_path / "record.py").write_text("import sys\nsys.modules['ledger.run'].judge = None\n")
        table.apart(run.judge, tmp_path / "record.py", tmp_path / "a.pt", "pocket", "cpu", 0)
    assert run.judge


def test_a_file_that_a_script_reads_is_named_in_its_claim(tmp_path, capsys):
    records = make_records(tmp_path)
    set_gain(records, None)
    script = records / NEWEST / "train_gpt.py"
    edit(script, "def train(cfg):", "def train(cfg):\n    np.load(cfg.table)")
    shutil.copy(script, tmp_path)  # the root is this record
    edit(records / NEWEST / "record.json", '"gain": null', '"gain": null, "reads": "a table"')
    assert findings_anew(records, capsys) == []
    assert main(["verify", str(records)]) == 0
    assert f"{NEWEST}: reads a file above the banner: a table" in capsys.readouterr().err
    edit(script, "np.load(", "np.fromfile(")
    assert any("has `np.fromfile` above the banner" in line for line in findings(records, capsys))
