"""The two fake records measured once, and copies of them to be spoilt."""

import shutil

import pytest
from fake_records import NEWEST, PARENT, make_records
from ledger.__main__ import main


@pytest.fixture(scope="session")
def measured(tmp_path_factory):
    """The root of two records with ten runs each, which lie in out/ too."""
    root = tmp_path_factory.mktemp("measured")
    records = make_records(root)
    operands = [str(records / PARENT), str(records / NEWEST)]
    words = ["--file", "--folder", str(records), "--out", str(root / "out")]
    assert main(["run", *operands, *words]) == 0
    assert main(["list", str(records), "--write"]) == 0
    return root


@pytest.fixture
def records(measured, tmp_path):
    """A copy of the measured records."""
    shutil.copytree(measured, tmp_path, ignore=lambda *_: ["out"], dirs_exist_ok=True)
    return tmp_path / "records"
