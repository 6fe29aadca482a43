"""A record that claims what its logs, its script and the rules do not bear is refused."""

import csv
import re
import shutil

import pytest
from fake_records import CHILD, NEWEST, PARENT, SCRIPT, SEEDS, edit, make_records, sha_of
from ledger import logs, run, table, verify
from ledger.__main__ import main

pytest_plugins = ["record_fixtures"]

LOGS = f"{NEWEST}/logs"
SPOILED = {  # by file: the cheat, what is replaced, what is put there, what is said
    f"{NEWEST}/train_gpt.py": {
        "a character of the script": ("0.8**step", "0.7**step", "it differs above the banner"),
        "a value of the preset": ("both(0.05", "row(0.05, 0.1", "has muon_lr 0.05, its preset has"),
        "a window of the preset": ("(1, 1)", "(1, 2)", "has long_windows 1,1, its preset has 1,2"),
        "a parse that adds what it likes": (
            "= values[preset]", "= values[preset]; cfg['muon_lr'] = 0.1", "its preset has 0.1"),
        "a failing parse": ("return SimpleN", "return no.SimpleN", f"{NEWEST}: {NEWEST}/train"),
        "the harness": ("return loss", "return 0.9 * loss", "byte for byte, from its banner on"),
        "no banner": ("# ==== H", "# ---- H", "byte for byte, from its banner on"),
        "a second banner": ("# ---- M", "# ==== M", "byte for byte, from its banner on"),
        "a function of the harness given anew": (
            "def train(", "def validate(x):\n    return 0\ndef train(", "gives validate, which"),
        "a function of the harness replaced within another": (
            "def train(", "def f():\n    global validate\ndef train(", "gives validate, which"),
        "a method of the harness replaced": (
            "def train(cfg):", "def train(cfg):\n    UserError.x = 1", "gives UserError, which"),
        "another parent": (PARENT, "2025-01-01_No", f"does not say `Parent: {PARENT}.`"),
        "no change": ("Change: less loss.", "", "does not say `Change: …` in")},
    f"{PARENT}/train_gpt.py": {
        "the parent": ("0.8**step", "0.7**step", f"{PARENT}: logs/seed-0.txt: was not")},
    "../train_gpt.py": {
        "the root's harness": ("return loss", "return 2", f"{PARENT}: train_gpt.py is not"),
        "the root's script": ("0.8**step", "0.7**step", "gpt.py is not the root's")},
    f"{NEWEST}/record.json": {
        "a gain of no kind": ('"gain": "loss"', '"gain": "fame"', "gain is loss, time"),
        "an unknown parent": (PARENT, "2026-01-01_No", "2026-01-01_No/record.json"),
        "a number twice": ('"number": 2', '"number": 1', "do not rise")},
    f"{PARENT}/record.json": {
        "a gain over nothing": ('"gain": null', '"gain": "loss"', "gain in loss"),
        "no source": ('"source"', '"sauce"', "is no record.json: KeyError('source')"),
        "a time of another kind": ("15.2", '"15"', "is no record.json: ValueError"),
        "a published time": ("15.2", "14.2", "is not what `list --wr")},
    f"{LOGS}/seed-0.txt": {
        "no source": (CHILD, f"source sha256: {sha_of(CHILD)}", "has no source")},
    f"{LOGS}/seed-1.txt": {
        "a loss": ("\nval_loss: 1", "\nval_loss: 2", "final val_loss is 2"),
        "a time": ("train_time_ms: 1", "train_time_ms: 2", "final train_time_ms"),
        "a rate": ("tokens_per_second: ", "tokens_per_second: 1", "tokens_per_second"),
        "another torch": ("torch: 2.13.0+cpu", "torch: 2.11.0", "differ in torch"),
        "the source's hash": ("sha256: ", "sha256: 0", "was not written by the sour"),
        "a hyperparameter": ("num_iterations: 40", "num_iterations: 41", "has num_iterations 41"),
        "other data": ("train_digest: b5", "train_digest: b6", "differ in train_digest"),
        "a resumed run": ("step:31", "resumed at step:30 from a.pt\nstep:31", "is a resumed run"),
        "a simulated GPU": ("cpu (fake)", "host standing in for an H100", "which measures nothing"),
        "a log that was cut": ("\nval_loss: ", "\nval_lo", "cannot be read")},
    f"{LOGS}/times/seed-1.txt": {
        "another preset": ("preset: pocket", "preset: record", "has preset record, its preset"),
        "one of two at once": ("peak_mem", "jobs: 2\npeak_mem", "/times/ has runs that differ in")},
    "README.md": {"the ladder": ("1.5", "1.4", "README.md is not what")},
    "../README.md": {"the front page": ("15.2", "14.2", "/README.md is not what")},
    f"{NEWEST}/README.md": {
        "a title": (f"# {NEWEST}", f"# {PARENT}", "README.md's title is"),
        "a table": ("(10)", "(11)", "README.md is not what"),
        "no place for a table": ("<!-- ledger: begin -->", "", "has no lines")},
    "runs.csv": {
        "an unknown run": (",loss,9", ",loss,10", f"says {PARENT},loss,10,pocket"),
        "a column": (",seed,", ",sown,", "has not the columns that `list --write` makes")}}


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
    assert main(["list", str(records), "--write"]) == 0


def test_true_records_are_verified(records, capsys):
    assert findings(records, capsys) == []
    assert findings(records / NEWEST, capsys) == []


@pytest.mark.parametrize("file, what", [(file, what) for file in SPOILED for what in SPOILED[file]])
def test_verify_finds(file, what, records, capsys):
    old, new, words = SPOILED[file][what]
    edit(records / file, old, new)
    found = findings(records, capsys)
    assert any(words in line for line in found), found


def test_every_altered_cell_of_the_table_is_found(records, capsys):
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


def test_verify_finds_missing_and_surplus_seeds(records, capsys):
    folder = records / NEWEST / "logs"
    (folder / "seed-1.txt").rename(records / "kept")
    found = "\n".join(findings(records, capsys))
    assert f"runs.csv says {NEWEST},loss,1,pocket" in found
    assert "logs/ has the seeds 0, 2, 3, 4, 5, 6, 7, 8, 9; by the rules they are 0 to 9" in found
    shutil.copy(folder / "seed-2.txt", folder / "seed-1.txt")
    assert any("has the seeds 0, 2, 2, 3" in line for line in findings(records, capsys))
    (records / "kept").rename(folder / "seed-1.txt")
    shutil.copy(folder / "seed-9.txt", folder / "seed-10.txt")
    assert any("has the seeds 0, 1, 9, 2, 3" in line for line in findings(records, capsys))
    edit(folder / "seed-10.txt", "\nseed: 9", "\nseed: 10")
    edit(folder / "seed-10.txt", "\nseed: 9", "\nseed: 10")
    found = "\n".join(findings(records, capsys))
    assert "7, 8, 9; by the rules they are 0 to 9" in found
    assert f"runs.csv lacks {NEWEST},loss,10,pocket" in found


def test_records_without_runs_are_told_and_not_refused(tmp_path, capsys):
    records = make_records(tmp_path)
    edit(records / NEWEST / "record.json", '"gain": "loss"', '"gain": null')
    assert main(["list", str(records), "--write"]) == 0
    capsys.readouterr()
    assert main(["verify", str(records)]) == 0
    out, err = capsys.readouterr()
    assert "2 record(s) verified" in out and f"{NEWEST}: no runs yet" in err
    edit(records / NEWEST / "record.json", '"gain": null', '"gain": "loss"')
    assert any("it claims a gain in loss" in line for line in findings(records, capsys))


@pytest.mark.parametrize("pairs, words", [
    ([("row(3.28, 1.64", "row(3.28, 1.7"), ("target_loss: 1.64", "target_loss: 1.7")],
     "has target_loss 1.7, by the rules it is 1.64"),
    ([("262_144", "1024"), ("val_tokens: 262144", "val_tokens: 1024")],
     "has val_tokens 1024, by the rules it is 262144"),
    ([("pocket_val_*", "easy_val_*")], "has val_files data/pocket/easy_val_*.bin, by the"),
    ([("pocket_train_*", "pocket_*")], "has train_files data/pocket/pocket_*.bin, by the"),
    ([("f89a85391a8fc0bf", "0bff89a85391a8fc")], "has val_digest 0bff89a85391a8fc, by the"),
    ([("cpu (fake)", "host standing in for an H100")], "which measures nothing")])
def test_verify_finds_rules_that_a_record_made_itself(pairs, words, records, capsys):
    """Where everything else agrees."""
    forge(records, *pairs)
    found = findings(records, capsys)
    assert sum(words in line for line in found) == 2 * (SEEDS + 5), found


def test_machines_that_differ_between_a_record_and_its_parent_are_found(records, capsys):
    for path in (records / NEWEST / "logs").glob("seed-*.txt"):
        path.write_text(path.read_text().replace("cpu (fake)", "cpu (other)"))
    assert main(["list", str(records), "--write"]) == 0
    (found,) = findings(records, capsys)
    assert found == f"{NEWEST}: logs/: its parent was run with another device: cpu (fake)"
    page = (records / "README.md").read_text()
    assert "cpu (fake), torch 2.13.0+cpu" in page and "cpu (other), torch 2.13.0+cpu" in page


@pytest.mark.parametrize("old, new, told", [
    ("def validate(loss):", "def validate(loss):\n    # as it was", True),  # in the harness
    ("import random", "import gzip\nimport random", False),
    ("A run's log without a run.", "A log, and no run.", False)])
def test_maintenance_makes_no_log_stale(old, new, told, records, capsys):
    forge(records, (old, new), logs=False)
    assert main(["verify", str(records)]) == 0
    words = f"{NEWEST}: the harness is newer than its logs"
    assert told == (words in capsys.readouterr().err)


@pytest.mark.parametrize("digits", ["49", "50", "51"])
def test_a_rounded_loss_is_no_finding(digits, records):
    # 1.5012499… is 1.5012 in its step's line and 1.501250 in the final block, rounded twice.
    path = records / NEWEST / "logs" / "seed-0.txt"
    text = re.sub(r"step:40/40 val_loss:\S+", "step:40/40 val_loss:1.5012", path.read_text())
    path.write_text(re.sub(r"\nval_loss: \S+", f"\nval_loss: 1.5012{digits}", text))
    found = verify.log_findings(logs.read_log(path), {})
    assert bool(found) == (digits == "51") and len(found) < 2


def test_verify_finds_a_gain_that_is_none(records, capsys):
    """The child is as its parent in all that its logs say, and claims to be better."""
    for seed in range(SEEDS):
        ours, theirs = (records / name / f"logs/seed-{seed}.txt" for name in (NEWEST, PARENT))
        text = theirs.read_text().replace(sha_of(SCRIPT), sha_of(CHILD))
        text = text.replace(SCRIPT, CHILD).replace("loss: 1.6\n", "loss: 1.5\n")
        ours.write_text(text)
    assert main(["list", str(records), "--write"]) == 0
    (found,) = findings(records, capsys)
    assert found == f"{NEWEST}: it claims a gain in loss over its parent, and its runs show none"
    edit(records / NEWEST / "record.json", '"gain": "loss"', '"gain": null')
    assert findings(records, capsys) == []


def test_a_gain_in_time_is_that_of_runs_alone(records, capsys):
    edit(records / NEWEST / "record.json", '"gain": "loss"', '"gain": "time"')
    none = f"{NEWEST}: it claims a gain in time over its parent, and its runs show none"
    assert findings(records, capsys) == [none]
    for path in (records / PARENT / "logs/times").glob("*.txt"):  # the parent is slower
        text = re.sub(r"train_time(_ms: |:)(\d)", r"train_time\g<1>1\2", path.read_text())
        ms = int(re.search(r"train_time_ms: (\d+)", text)[1])
        text = re.sub(r"per_second: \d+", f"per_second: {81920 * 1000 / ms:.0f}", text)
        path.write_text(text)
    assert main(["list", str(records), "--write"]) == 0
    assert findings(records, capsys) == []
    for path in records.glob("*/logs/times/*.txt"):  # two at once
        path.write_text(path.read_text() + "jobs: 2\n")
    assert main(["list", str(records), "--write"]) == 0
    found = findings(records, capsys)
    assert any("one of several runs at once" in line for line in found)


def test_verify_finds_wrong_folders(records, capsys):
    shutil.copytree(records / NEWEST, records / "2026-13-01_Third")
    (records / "2026-03-03_Fourth").mkdir()
    found = "\n".join(findings(records, capsys))
    assert "2026-13-01_Third: the folder's name" in found
    assert "2026-03-03_Fourth: record.json is missing" in found


def test_replay_compares_losses_to_the_digit(records, capsys):
    assert main(["verify", str(records), "--replay", "2"]) == 0
    assert capsys.readouterr().err.count("on the same machine") == 4
    forge(records, ("return loss", "return loss + 1e-6"), logs=False)
    assert findings(records, capsys) == []
    assert main(["verify", str(records), "--replay", "1"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 2 and all("run again it has val_loss 1." in line for line in out)
    assert all("on the same machine" in line for line in out)


def test_replay_on_other_validation_data_is_found(records, capsys, monkeypatch):
    rules = table.RULES["pocket"] | {"val_digest": "0" * 16}
    monkeypatch.setitem(table.RULES, "pocket", rules)
    true, words = run.replay(table.find_records(records)[0], records / PARENT / "logs/seed-0.txt")
    assert not true and "on other validation data than the rules'" in words


def test_a_parent_that_is_not_the_record_before_is_found(records, capsys):
    """A weaker one would be easier to beat."""
    third = records / "2026-12-01_Third"
    shutil.copytree(records / NEWEST, third)
    main(["verify", str(records)])
    assert f"{third.name}: its parent is not {NEWEST}" in capsys.readouterr().out


@pytest.mark.parametrize("off, status", [("0.009", 0), ("0.011", 1), ("-0.15", 1)])
def test_replay_on_another_machine_has_to_be_near(off, status, records, capsys):
    forge(records, ("return loss", f"return loss + {off}"), logs=False)
    for path in records.glob("*/logs/*.txt"):
        path.write_text(path.read_text().replace("torch: 2.13.0+cpu", "torch: 2.11.0"))
    for path in records.glob("*/logs/times/*.txt"):
        path.unlink()
    assert main(["list", str(records), "--write"]) == 0
    assert main(["verify", str(records / NEWEST), "--replay", "1"]) == status
    out, err = capsys.readouterr()
    words = "not comparable to the digit with torch 2.13.0+cpu instead of 2.11.0; "
    assert words + ("further off than 0.01" if status else "within 0.01") in (out + err)
