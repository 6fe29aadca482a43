"""The folders of the records, in the order of their dates."""

import json

import pytest
from conftest import REPO

RECORDS = sorted(path.parent for path in (REPO / "records").glob("20*/record.json"))


def claim(record):
    """What its record.json says."""
    return json.loads((record / "record.json").read_text())


def for_each(records):
    return pytest.mark.parametrize("record", records, ids=[record.name for record in records])


def for_each_slowly(records):
    """The same of a test that takes seconds: it is `slow` but for the root's record and the newest,
    which has most of what the others have."""
    root = (REPO / "train_gpt.py").read_text()
    params = []
    for record in records:
        is_quick = record == RECORDS[-1] or (record / "train_gpt.py").read_text() == root
        marks = [] if is_quick else [pytest.mark.slow]
        params.append(pytest.param(record, id=record.name, marks=marks))
    return pytest.mark.parametrize("record", params)
