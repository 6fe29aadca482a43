"""The two fake records measured once, and copies of them to be spoilt."""

import shutil
from types import SimpleNamespace

import pytest
from fake_records import NEWEST, PARENT, make_records
from ledger import pages
from ledger.__main__ import main


@pytest.fixture(scope="session")
def measured(tmp_path_factory):
    """The root of two records with ten runs each, which lie in out/ too."""
    root = tmp_path_factory.mktemp("measured")
    records = make_records(root)
    operands = [str(records / PARENT), str(records / NEWEST), "--out", str(root / "out")]
    assert main(["run", *operands]) == 0
    runs = map(str, (root / "out").glob("logs/*/log.txt"))
    assert main(["file", *runs, "--folder", str(records)]) == 0
    assert main(["list", str(records), "--write"]) == 0
    return root


@pytest.fixture
def records(measured, tmp_path):
    """A copy of the measured records."""
    shutil.copytree(measured, tmp_path, ignore=lambda *_: ["out"], dirs_exist_ok=True)
    return tmp_path / "records"


@pytest.fixture
def no_ladder(monkeypatch):
    """`list --write` draws its picture for `measured`; it takes long."""
    monkeypatch.setattr(pages, "ladder_figure", lambda records: SimpleNamespace(
        savefig=lambda *_, **__: None))
