"""A record that claims what its logs, its script and the rules do not bear is refused."""

import csv
import re
import shutil

import pytest
from fake_records import (
    CHILD,
    NEWEST,
    PARENT,
    SCRIPT,
    SEEDS,
    edit,
    findings,
    forge,
    main,
    make_records,
    sha_of,
)
from ledger import logs, run, table, verify

pytest_plugins = ["record_fixtures"]

LOGS, TIMES = f"{NEWEST}/logs", f"{NEWEST}/logs/times"
SPOILED = {
    "a character of the script": (
        f"{NEWEST}/train_gpt.py", "0.8**step", "0.7**step", "it differs above the banner"),
    "the parent's script": (
        f"{PARENT}/train_gpt.py", "0.8**step", "0.7**step", f"{PARENT}: logs/seed-0.txt: was not"),
    "a value of the preset": (
        f"{NEWEST}/train_gpt.py", "both(0.05", "row(0.05, 0.1", "has muon_lr 0.05, its preset has"),
    "a window of the preset": (
        f"{NEWEST}/train_gpt.py", "(1, 1)", "(1, 2)", "has long_windows 1,1, its preset has 1,2"),
    "a parse that adds what it likes": (
        f"{NEWEST}/train_gpt.py", "cfg[name] = values[preset]",
        "cfg[name] = values[preset]; cfg['muon_lr'] = 0.1", "has muon_lr 0.05, its preset has 0.1"),
    "the harness": (
        f"{NEWEST}/train_gpt.py", "return loss", "return 0.9 * loss", "byte for byte, from its b"),
    "the root's harness": (
        "../train_gpt.py", "return loss", "return 0.9 * loss", f"{PARENT}: train_gpt.py is not"),
    "a script without a banner": (
        f"{NEWEST}/train_gpt.py", "# ==== H", "# ---- H", "byte for byte, from its banner on"),
    "a second banner": (
        f"{NEWEST}/train_gpt.py", "# ---- Model", "# ==== Model", "byte for byte, from its banner"),
    "a function of the harness with another meaning": (
        f"{NEWEST}/train_gpt.py", "def train(", "def validate(loss):\n    return 0\n\ndef train(",
        "gives validate, which the harness defines"),
    "a function of the harness replaced within another": (
        f"{NEWEST}/train_gpt.py", "def train(", "def cheat():\n    global validate\n\ndef train(",
        "gives validate, which the harness defines"),
    "a method of the harness replaced": (
        f"{NEWEST}/train_gpt.py", "def train(cfg):", "def train(cfg):\n    UserError.x = 1",
        "gives UserError, which the harness defines"),
    "a docstring with another parent": (
        f"{NEWEST}/train_gpt.py", f"Parent: {PARENT}.", "Parent: 2025-01-01_No.",
        f"does not say `Parent: {PARENT}.`"),
    "a docstring without a change": (
        f"{NEWEST}/train_gpt.py", "Change: less loss.", "", "does not say `Change: …` in"),
    "a README with another title": (
        f"{NEWEST}/README.md", f"# {NEWEST}", f"# {PARENT}", "README.md's title is"),
    "the root's script": ("../train_gpt.py", "0.8**step", "0.7**step", "gpt.py is not the root's"),
    # The claim
    "a gain in time": (
        f"{NEWEST}/record.json", '"gain": "loss"', '"gain": "time"', "its runs show none"),
    "a gain of no kind": (
        f"{NEWEST}/record.json", '"gain": "loss"', '"gain": "fame"', "gain is loss, time"),
    "a gain over nothing": (
        f"{PARENT}/record.json", '"gain": null', '"gain": "loss"', "gain in loss"),
    "an unknown parent": (
        f"{NEWEST}/record.json", f'"{PARENT}"', '"2026-01-01_No"', "2026-01-01_No/record.json"),
    "a claim without a source": (
        f"{PARENT}/record.json", '"source"', '"sauce"', "is no record.json: KeyError('source')"),
    "a claim of another kind": (
        f"{PARENT}/record.json", "15.2", '"15"', "is no record.json: ValueError"),
    "a number twice": (f"{NEWEST}/record.json", '"number": 2', '"number": 1', "do not rise"),
    "a published time": (f"{PARENT}/record.json", "15.2", "14.2", "is not what `list --wr"),
    # The logs
    "a loss in a log": (
        f"{LOGS}/seed-1.txt", "\nval_loss: 1", "\nval_loss: 2", "final val_loss is 2"),
    "a time in a log": (
        f"{LOGS}/seed-1.txt", "train_time_ms: 1", "train_time_ms: 2", "final train_time_ms"),
    "a time in a log's lines too": (
        f"{LOGS}/seed-1.txt", "tokens_per_second: ", "tokens_per_second: 1", "tokens_per_second"),
    "the torch of a log": (
        f"{LOGS}/seed-1.txt", "torch: 2.13.0+cpu", "torch: 2.11.0", "differ in torch"),
    "a hyperparameter of a log": (
        f"{LOGS}/seed-2.txt", "num_iterations: 40", "num_iterations: 41", "has num_iterations 41"),
    "other training data in one seed": (
        f"{LOGS}/seed-4.txt", "train_digest: b5", "train_digest: b6", "differ in train_digest"),
    "a resumed run": (
        f"{LOGS}/seed-4.txt", "step:31/40", "resumed at step:30 from a.pt\nstep:31/40",
        "seed-4.txt: is a resumed run"),
    "a simulated GPU": (
        f"{LOGS}/seed-4.txt", "device: cpu (fake)", "device: host standing in for an H100",
        "host standing in for an H100, which measures nothing"),
    "the source's hash in a log": (
        f"{LOGS}/seed-1.txt", "source sha256: ", "source sha256: 0", "was not written by the sour"),
    "a first log without its source": (
        f"{LOGS}/seed-0.txt", CHILD, f"source sha256: {sha_of(CHILD)}", "has no source"),
    "a log that was cut": (f"{LOGS}/seed-3.txt", "\nval_loss: ", "\nval_lo", "cannot be read"),
    # The runs made for their times
    "one of two at once": (
        f"{TIMES}/seed-1.txt", "peak_memory_mib: 99", "jobs: 2\npeak_memory_mib: 99",
        "logs/times/ has runs that differ in jobs"),
    "a lone run of another preset": (
        f"{TIMES}/seed-0.txt", "preset: pocket", "preset: record", "has preset record, its preset"),
    # Tables
    "the ladder's table": ("README.md", "1.5", "1.4", "README.md is not what"),
    "the front page's table": ("../README.md", "15.2", "14.2", "/README.md is not what"),
    "a record's README": (f"{NEWEST}/README.md", "(10)", "(11)", "README.md is not what"),
    "a README without its lines": (
        f"{NEWEST}/README.md", "<!-- ledger: begin -->", "", "has no lines"),
    "a row of an unknown run": (
        "runs.csv", f"{NEWEST},loss,9", f"{NEWEST},loss,10", f"says {NEWEST},loss,10,pocket")}


def test_true_records_are_verified(records, capsys):
    assert findings(records, capsys) == []
    assert findings(records / NEWEST, capsys) == []


@pytest.mark.parametrize("what", SPOILED)
def test_verify_finds(what, records, capsys):
    file, old, new, words = SPOILED[what]
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


@pytest.mark.parametrize(
    "pairs, words",
    [
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


MAINTENANCE = {
    "the harness": ("def validate(loss):", "def validate(loss):\n    # as it was"),
    "an import for the harness": ("import random", "import gzip\nimport random"),
    "the docstring": ("A run's log without a run.", "A log, and no run.")}


@pytest.mark.parametrize("what", MAINTENANCE)
def test_maintenance_makes_no_log_stale(what, records, capsys):
    forge(records, MAINTENANCE[what], logs=False)
    assert findings(records, capsys) == []
    assert main(["verify", str(records)]) == 0
    told = f"{NEWEST}: the harness is newer than its logs" in capsys.readouterr().err
    assert told == (what == "the harness")


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
