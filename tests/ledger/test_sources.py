"""The generated line of sources on a record's page."""

from pathlib import Path

from ledger import pages
from ledger.records import Record

HOME = "https://github.com/KellerJordan/modded-nanogpt"


def record(name, **more):
    published = more.pop("published", None)
    return Record(Path(name), {"published": published, "parent": None}, **more)


def test_a_record_links_what_it_retells():
    source = "KellerJordan/modded-nanogpt, records/track_1_short/2025-05-30_none, log 8054c239"
    whole = record("2025-05-30_Whole", published={"number": 24, "source": source})
    step = record("2025-05-29_24a_Step", leads_to=24)
    part = record("2025-05-31_24h_Part")
    for one in whole, step, part:
        assert pages.sources(one, [step, whole, part], {24: {"pr": 102}}) == (
            f"[public record #24]({HOME}/tree/master/records/track_1_short/2025-05-30_none)"
            f" · [pull request 102]({HOME}/pull/102) · [our script](train_gpt.py)")


def test_a_record_without_a_folder_links_its_commit():
    source = "KellerJordan/modded-nanogpt, commit ab8cf2d6"
    one = record("2026-07-13_One", published={"number": 88, "source": source})
    assert pages.sources(one, [one], {}) == (
        f"[public record #88]({HOME}/tree/ab8cf2d6) · [our script](train_gpt.py)")


def test_a_record_of_our_own_has_no_sources():
    one = record("2027-01-01_Own")
    assert pages.sources(one, [one], {}) == ""
