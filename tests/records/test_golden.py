"""The records compute what golden.toml has, and the file takes new numbers as it says."""

import golden
import pytest
from record_folders import RECORDS, for_each_slowly, one_of_each_kind

ENTRIES = golden.read_file()
KNOWN, NEW = [*golden.RECORDS][:2]
KINDS = one_of_each_kind(RECORDS, "train", "cut_rows")


@for_each_slowly(RECORDS, quick=KINDS)
def test_a_record_computes_its_golden_numbers(record):
    assert record.name in ENTRIES, f"python tests/records/golden.py --write {record.name}"
    numbers = golden.measure(record)
    assert golden.differences(numbers, golden.numbers_of(ENTRIES[record.name])) == []


def test_the_file_has_no_other_records():
    assert ENTRIES.keys() <= set(golden.RECORDS)


@pytest.fixture
def numbers(tmp_path, monkeypatch):
    """What any record computes: 1 and 2, as a file has it of one record."""
    numbers = {"loss 0": [golden.Number(1.0, 1.0)], "embed.weight": [golden.Number(2.0, 4.0)] * 2}
    monkeypatch.setattr(golden, "FILE", tmp_path / "golden.toml")
    monkeypatch.setattr(golden, "measure", lambda path: numbers)
    assert golden.main(["--write", KNOWN]) == 0
    return numbers


def test_numbers_are_written_once_or_with_a_reason_that_stays(numbers, capsys):
    assert golden.main([KNOWN]) == 0
    assert golden.main([NEW]) == 1
    assert "has no numbers" in capsys.readouterr().out
    before = golden.FILE.read_text()
    with pytest.raises(SystemExit):
        golden.main(["--write", KNOWN])
    assert golden.FILE.read_text() == before
    for why in ('a "wrong" rate', "another one"):
        assert golden.main(["--write", "--why", why, KNOWN]) == 0
    assert golden.read_file()[KNOWN]["replaced"] == ['a "wrong" rate', "another one"]


@pytest.mark.parametrize(("name", "value"), [
    ("embed.weight", 2 + 8e-9), ("embed.weight", 2 - 8e-9), ("embed.weight", float("nan")),
    ("head.weight", 2)])
def test_what_differs_is_told(numbers, name, value, capsys):
    """Beyond the tolerance, or as it is missing, or unknown."""
    del numbers["embed.weight"]
    numbers[name] = [golden.Number(value, 4.0)] * 2
    assert golden.main([KNOWN]) == 1
    told = capsys.readouterr().out
    assert name in told and told.count("embed.weight") == (1 if name == "head.weight" else 2)
