"""What pages link: the generated line of sources, and the lines of functions."""

from pathlib import Path

import pytest
import torch
from conftest import REPO
from ledger import pages
from ledger.logs import LedgerError
from ledger.records import Record

import train_gpt

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
        assert pages.sources(one, [step, whole, part], {24: {"pr": 102}}, {}) == (
            f"[public record #24]({HOME}/tree/master/records/track_1_short/2025-05-30_none)"
            f" · [pull request 102]({HOME}/pull/102) · [our script](train_gpt.py)")


def test_a_record_without_a_folder_links_its_commit():
    source = "KellerJordan/modded-nanogpt, commit ab8cf2d6"
    one = record("2026-07-13_One", published={"number": 88, "source": source})
    assert pages.sources(one, [one], {}, {}) == (
        f"[public record #88]({HOME}/tree/ab8cf2d6) · [our script](train_gpt.py)")


def test_a_record_links_its_published_logs_and_its_diff(tmp_path):
    """Where record.json names no folder, the log's is the public record's."""
    (tmp_path / "public_curves.csv").write_text(
        "record,step,last_step,val_loss,train_time_s,logs,source\n"
        "92,9,9,3.2,40,1,records/track_1_short/2026-08-30_Two/runs/a.txt\n"
        "85,9,9,3.2,40,20,records/track_1_short/2026-05-27-Many\n")
    logs = pages.published_logs(tmp_path)
    parent = record("2026-05-27_Whole", published={"number": 85, "source": "PR 316"})
    step = record("2026-08-30_92a_Step", leads_to=92, parent=parent)
    line = pages.sources(step, [parent, step], {}, logs)
    folder = f"{HOME}/tree/master/records/track_1_short"
    assert line == (
        f"[public record #92]({folder}/2026-08-30_Two)"
        f" · [published log]({HOME}/blob/master/records/track_1_short/2026-08-30_Two/runs/a.txt)"
        f" · [our script](train_gpt.py) · [diff, on the site]({pages.SITE})")
    many = f"[20 published logs]({folder}/2026-05-27-Many)"
    assert many in pages.sources(parent, [parent, step], {}, logs)
    assert pages.published_logs(tmp_path / "none") == {}


def test_a_record_of_our_own_has_no_sources():
    one = record("2027-01-01_Own")
    assert pages.sources(one, [one], {}, {}) == ""


SCRIPT = """class First:
    def step(self):
        pass

class Second:
    x = 1

    @staticmethod
    def step():
        pass

def step():
    pass
"""


def test_links_to_functions_get_their_lines(tmp_path):
    (tmp_path / "a.py").write_text(SCRIPT)
    page = tmp_path / "page.md"
    page.write_text("[`step`](a.py#L0) [`Second.step`](a.py#L0) [`First`](a.py#L0) [`a`](a.py)")
    assert pages.filled(page, {}) == (
        "[`step`](a.py#L12) [`Second.step`](a.py#L9) [`First`](a.py#L1) [`a`](a.py)")


def test_a_link_to_no_function_is_an_error(tmp_path):
    (tmp_path / "a.py").write_text(SCRIPT)
    (tmp_path / "page.md").write_text("[`leap`](a.py#L1)")
    with pytest.raises(LedgerError, match="does not define leap"):
        pages.filled(tmp_path / "page.md", {})


def test_each_technique_links_the_line_that_defines_its_function():
    page = REPO / "docs/techniques.md"
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    found = [pages.DEFINED.search(row) for row in rows if not row.startswith("| Technique |")]
    assert len(found) > 100 and all(found)
    for link in found:
        name, script, line = link.groups()
        code = (page.parent / script).read_text().splitlines()[int(line) - 1].split("(")[0]
        assert code.strip(" :") in (f"def {name.split('.')[-1]}", f"class {name}")


def test_the_functions_that_the_page_offers_touch_their_arguments_alone():
    torch.manual_seed(0)
    matrices = torch.randn(2, 8, 4)
    before = matrices.clone()
    found = train_gpt.orthogonalize(matrices, torch.float32)
    assert torch.equal(matrices, before)
    assert torch.linalg.svdvals(found).sub(1).abs().max() < 0.3

    weight, mean, square = torch.ones(2, 8, 4), torch.zeros(2, 8, 4), torch.zeros(2, 8, 1)
    train_gpt.muon_update(weight, matrices, mean, square, step_size=torch.full((2, 1, 1), 0.1),
                          momentum=0.9, decay=0.0, dtype=torch.float32)
    state = torch.ones(8, 4), torch.zeros(8, 4), torch.zeros(8, 4)
    train_gpt.adam_update(state[0], matrices[0], *state[1:], torch.zeros(()), lr=0.1,
                          betas=(0.9, 0.99), decay=0.0)
    assert torch.equal(matrices, before)
    for changed in weight, state[0]:
        assert changed.isfinite().all() and not torch.equal(changed, torch.ones_like(changed))
