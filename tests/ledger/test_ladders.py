"""Records by steps, in records/optimizers/, are in the same list as those by time."""

import json
import shutil

import pytest
from fake_records import NEWEST, PARENT, edit, log_of
from ledger import records as ledger_records
from ledger.__main__ import main

pytest_plugins = ["record_fixtures"]

FIRST, STEP, LAST = "2026-04-01_o1_Plain", "2026-05-01_o36a_Half", "2026-06-01_o36_Tuned"
RESULT = dict(result=36, steps=3250, val_loss=3.2785, n=4, hardware="A40", source="x")
OWN = "2026-05-02_Own"  # without a label it is the last, whatever its date
# The first one's is of the other ladder.
PARENTS = {FIRST: PARENT, STEP: FIRST, LAST: STEP, OWN: LAST}


@pytest.fixture
def both(records, monkeypatch):
    """The records by time, and four by steps without runs, whose pocket is the same here."""
    monkeypatch.setitem(ledger_records.RULES, "steps", ledger_records.RULES["time"])
    for number, (name, parent) in enumerate(PARENTS.items()):
        folder = records / "optimizers" / name
        shutil.copytree(records / NEWEST, folder, ignore=shutil.ignore_patterns("logs"))
        edit(folder / "README.md", f"# {NEWEST}", f"# {name}")
        script = folder / "train_gpt.py"
        edit(script, f"Record: {NEWEST}", f"Record: {name}")
        edit(script, f"Parent: {PARENT}", f"Parent: {parent}")
        edit(script, "loss: float = 1.5", f"loss: float = 1.{number}")
        claim = {"change": "less", "parent": parent, "published": None}
        if name == LAST:
            claim["published"] = RESULT
        (folder / "record.json").write_text(json.dumps(claim))
    block = "<!-- ledger: begin{} -->\n<!-- ledger: end -->\n"
    (records / "optimizers/README.md").write_text(block.format("") + block.format(" public"))
    return records


def test_both_ladders_are_one_list(both):
    folders = ledger_records.record_folders(both)
    assert [folder.name for folder in folders] == [PARENT, NEWEST, *PARENTS]
    found = ledger_records.find_records(both)
    assert [record.folder for record in found] == folders
    assert [record.ladder for record in found] == 2 * ["time"] + 4 * ["steps"]
    assert [record.name for record in found[2:]] == ["o1 Plain", "o36a Half", "o36 Tuned", "Own"]
    assert [record.parent for record in found[2:]] == [found[0], *found[2:5]]
    assert [record.leads_to for record in found] == [None, None, 1, 36, None, None]


def test_a_record_by_steps_is_measured_filed_and_verified(both, tmp_path, capsys):
    """A log goes to its folder. The folder alone can be verified, too."""
    folder = both / "optimizers" / LAST
    files = ["--file", "--folder", str(both), "--out", str(tmp_path / "own")]
    assert main(["run", str(folder), "--seeds", "2", *files]) == 0
    assert len([*folder.glob("logs/*")]) == 2
    assert main(["file", str(log_of(tmp_path / "own", LAST, 1)), "--folder", str(folder)]) == 0
    assert main(["list", str(both), "--write"]) == 0
    assert LAST not in (both / "README.md").read_text()  # a table has one ladder
    for name in (both, folder):
        capsys.readouterr()
        assert main(["verify", str(name)]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("name, old, new, words", [
    (LAST, '"result": 36', '"number": 36', "result is None"),
    (LAST, '"steps": 3250', '"steps": 3250.5', "steps is 3250.5"),
    (LAST, '"result": 36', '"result": 37', "its name is not that of result 37"),
    (STEP, f'"{FIRST}"', f'"{LAST}"', "is missing, not older, or comes")])
def test_a_wrong_claim_is_told(name, old, new, words, both, capsys):
    edit(both / "optimizers" / name / "record.json", old, new)
    assert main(["verify", str(both)]) > 0
    told = "".join(capsys.readouterr())
    assert name in told and words in told


def test_each_ladder_has_rules_of_its_own(both, tmp_path, monkeypatch, capsys):
    rules = {"pocket": ledger_records.SMALL | {"val_tokens": "4096"}}
    monkeypatch.setitem(ledger_records.RULES, "steps", rules)
    last = str(both / "optimizers" / LAST)
    assert main(["run", last, "--seeds", "1", "--out", str(tmp_path)]) == 0
    log = log_of(tmp_path, LAST, 0)
    assert main(["file", str(log), "--folder", str(both)]) == 2
    assert "val_tokens 65536, by the rules it is 4096" in capsys.readouterr().err
    for path in (both / NEWEST / "logs").glob("*"):  # by time it holds
        assert main(["file", str(path), "--folder", str(both)]) == 0
