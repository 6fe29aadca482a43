"""The records compute what golden.toml has, and the file takes new numbers as it says."""

import golden
import pytest

NAMES = sorted(path.parent.name for path in golden.REPO.glob("records/20*/train_gpt.py"))
ENTRIES = golden.read_file()
NEWEST = NAMES[-1]


@pytest.mark.parametrize("record", NAMES)
def test_a_record_computes_its_golden_numbers(record):
    assert record in ENTRIES, f"python tests/records/golden.py --write {record}"
    numbers = golden.measure(golden.REPO / "records" / record)
    assert golden.differences(numbers, golden.numbers_of(ENTRIES[record])) == []


def test_the_file_has_no_other_records():
    assert ENTRIES.keys() <= set(NAMES)


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A file with one record's numbers; any record computes 1 and 2."""
    found = {"loss 0": [golden.Number(1.0, 1.0)], "embed.weight": [golden.Number(2.0, 4.0)] * 2}
    monkeypatch.setattr(golden, "FILE", tmp_path / "golden.toml")
    monkeypatch.setattr(golden, "measure", lambda path: found)
    assert golden.main(["--write", NAMES[0]]) == 0
    return golden.FILE


def test_what_is_written_is_read_again(file, capsys):
    assert golden.main(["--write", NEWEST]) == 0
    assert golden.main([NAMES[0], NEWEST]) == 0
    assert golden.main([NAMES[1]]) == 1
    assert "has no numbers" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["--replace"], ["--why", "it was wrong"]])
def test_numbers_are_not_replaced_without_a_reason(file, words):
    before = file.read_text()
    with pytest.raises(SystemExit):
        golden.main(["--write", *words, NAMES[0]])
    assert file.read_text() == before


def test_the_file_keeps_the_reasons(file):
    for why in ('a "wrong" rate', "another one"):
        assert golden.main(["--write", "--replace", "--why", why, NAMES[0]]) == 0
    assert golden.read_file()[NAMES[0]]["replaced"] == ['a "wrong" rate', "another one"]


@pytest.mark.parametrize("value", [2.0 + 8e-9, 2.0 - 8e-9, float("nan")])
def test_a_difference_beyond_the_tolerance_is_told(file, monkeypatch, value, capsys):
    found = golden.measure(file) | {"embed.weight": [golden.Number(value, 4.0)] * 2}
    monkeypatch.setattr(golden, "measure", lambda path: found)
    assert golden.main([NAMES[0]]) == 1
    assert capsys.readouterr().out.count("embed.weight") == 2


def test_a_missing_and_an_unknown_parameter_are_told(file, monkeypatch, capsys):
    found = golden.measure(file)
    found["head.weight"] = found.pop("embed.weight")
    monkeypatch.setattr(golden, "measure", lambda path: found)
    assert golden.main([NAMES[0]]) == 1
    printed = capsys.readouterr().out
    assert "embed.weight" in printed and "head.weight" in printed
