"""The folders of the records of both ladders, oldest first, and which of them a test needs."""

import functools
import json
import re

import golden
import pytest
from conftest import REPO
from ledger.records import LABEL, RULES, ladder_of, record_folders

RECORDS = record_folders(REPO / "records")
LADDERS = {ladder: [record for record in RECORDS if ladder_of(record) == ladder]
           for ladder in RULES}
NEWEST = LADDERS["time"][-1]
load = functools.cache(golden.load)  # tests put back what they change


def claim(record):
    """What its record.json says."""
    return json.loads((record / "record.json").read_text())


@functools.cache
def parent_of(record):
    """The folder of its parent, if it has one."""
    name = claim(record)["parent"]
    return next((other for other in RECORDS if other.name == name), None)


def is_retold(record):
    """Whether it retells a public record or is a step to one, and is none of our own."""
    return bool(claim(record)["published"] or LABEL.search(record.name))


@functools.cache
def source(record):
    """Its script above the harness."""
    return (record / "train_gpt.py").read_text().partition("# ==== Harness")[0]


def below(record):
    """The harness, from its banner on."""
    return (record / "train_gpt.py").read_text()[len(source(record)) :]


def definition(record, *names):
    """The text of the first function or class of one of these names; None where it has none."""
    return next(iter(definitions(record, *names)), None)


def definitions(record, *names):
    """The texts of its functions and classes of these names, in the script's order."""
    pattern = rf"^(?:def|class) (?:{'|'.join(names)})\b.*?(?=^[^\s)]|\Z)"
    return re.findall(pattern, source(record), re.M | re.S)


def having(name):
    """The records whose script has a function, class, field or method of this name."""
    return [record for record in RECORDS if re.search(rf"^ *(def |class )?{name}[(:]",
                                                      source(record), re.M)]


def one_of_each_kind(records, *names):
    """Of those that have the same text of these functions and classes the last one.

    So the newest record is always among them.
    """
    found = {}
    for record in records:
        found[tuple(definitions(record, *names))] = record
    return list(found.values())


def first_of_its_kind(record, *names):
    """The oldest record that has the same text of these functions and classes."""
    return next(other for other in RECORDS
                if definitions(other, *names) == definitions(record, *names))


def for_each(records):
    return pytest.mark.parametrize("record", records, ids=[record.name for record in records])


def for_each_slowly(records, quick=()):
    """The same of a test that takes seconds: it is `slow` but for the quick ones and the newest
    record of a ladder, which has most of what the others have."""
    newest = [ladder[-1] for ladder in LADDERS.values() if ladder]
    params = []
    for record in records:
        marks = [] if record in [*quick, *newest] else [pytest.mark.slow]
        params.append(pytest.param(record, id=record.name, marks=marks))
    return pytest.mark.parametrize("record", params)
