"""The two fake records measured once, and copies of them to be spoilt."""

import shutil

import book
import pytest
from fake_records import NEWEST, PARENT, make_records
from ledger.__main__ import main


@pytest.fixture(autouse=True, scope="session")
def no_ladder():
    """The picture takes a second; test_book.py draws it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(book, "draw_ladder", lambda *_: None)
        yield


@pytest.fixture(scope="session")
def measured(tmp_path_factory, no_ladder):
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
