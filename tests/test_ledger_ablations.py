"""records/ledger_ablations.py: each row changes the script as it says, and numbers are scipy's.

    pytest tests/test_ledger_ablations.py
"""

import ast
import json
import sys

import pytest
from conftest import REPO
from scipy import stats

sys.path.insert(0, str(REPO / "records"))
import ledger
import ledger_ablations
from ledger_ablations import ABLATIONS, Ablation, Row
from ledger_base import LedgerError

ROOT = (REPO / "train_gpt.py").read_text()
BASE = [1.40, 1.42, 1.39, 1.41, 1.43]
RUNS = {
    "as-it-is": BASE,
    "gelu": [1.45, 1.46, 1.46, 1.45, 1.49],
    "no-key-offset": [1.50, 1.50, 1.52, 1.53, 1.51],  # published: 2.3 % of the steps
    "one-target": [1.44, 1.46, 1.44, 1.45, 1.46],  # 2.5 %
    "no-smear": [1.39, 1.40, 1.40, 1.41, 1.42],  # 0.3 %
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of records with one, the root's script, and kept results of four rows."""
    record = tmp_path / "2026-01-01_Only"
    record.mkdir()
    (record / "train_gpt.py").write_text(ROOT)
    claim = dict.fromkeys(ledger.read_record(record).claim) | {"number": 1}
    (record / "record.json").write_text(json.dumps({"claim": claim}))
    runs = {
        name: {
            str(seed): {"val_loss": loss, "train_time_ms": 1000 + len(name), "log_sha256": "0"}
            for seed, loss in enumerate(losses)
        }
        for name, losses in RUNS.items()
    }
    kept = {"record": record.name, "preset": "lab", "runs": {"175": runs}}
    kept["sections"] = ledger_ablations.sections_sha256(ROOT)
    (tmp_path / "ablations.json").write_text(json.dumps(kept))
    monkeypatch.setattr(ledger, "RECORDS", tmp_path)
    return tmp_path


@pytest.mark.parametrize("ablation", ABLATIONS, ids=lambda ablation: ablation.name)
def test_an_ablation_changes_the_root_script(ablation):
    changed = ablation.apply(ROOT)
    ast.parse(changed)
    assert changed != ROOT or ablation.flags
    for flag in ablation.flags:
        assert f"\n    {flag}: " in ROOT


def test_names_are_each_there_once():
    names = [ablation.name for ablation in ABLATIONS]
    assert len(set(names)) == len(names)
    with pytest.raises(LedgerError, match="nonsense: no ablation; there are"):
        ledger_ablations.chosen(["nonsense"])


def test_a_piece_that_is_not_there_once_is_told():
    for old in ("nowhere in it", "x"):
        with pytest.raises(LedgerError, match="not once"):
            Ablation("a", "b", ((old, ""),)).apply(ROOT)


def test_a_run_has_the_flags_of_its_row_and_the_steps_asked_for(folder, tmp_path):
    record = folder / "2026-01-01_Only"
    base, scale = ledger_ablations.contestants(record, ["scale"], tmp_path / "out", 90)
    assert (base.name, base.flags) == ("as-it-is", {"num_iterations": "90"})
    assert scale.flags == {"num_iterations": "90", "attention_scale": "0.1768"}
    assert scale.script.read_text() == base.script.read_text() == ROOT
    assert ledger_ablations.contestants(record, ["gelu"], tmp_path / "out", None)[1].flags == {}


def test_differences_are_paired_by_seed(folder):
    kept = json.loads((folder / "ablations.json").read_text())
    rows = {row.ablation.name: row for row in ledger_ablations.tables_of(kept)[175]}
    assert list(rows) == ["no-key-offset", "gelu", "one-target", "no-smear"]
    for name, row in rows.items():
        expected = stats.ttest_rel(RUNS[name], BASE)
        assert row.p == pytest.approx(expected.pvalue, rel=5e-3)
        low, high = expected.confidence_interval(0.95)
        assert (row.difference - row.interval, row.difference + row.interval) == pytest.approx(
            (low, high))  # fmt: skip
    assert rows["gelu"].is_shown and not rows["no-smear"].is_shown
    assert "not shown" in rows["no-smear"].words[4]


def test_the_calibration_counts_signs_and_ranks(folder):
    kept = json.loads((folder / "ablations.json").read_text())
    found = ledger_ablations.calibration(ledger_ablations.tables_of(kept)[175])
    assert (found["published"], found["agree"]) == (3, 2)
    # Here 0.102, 0.040 and -0.006; published 2.3, 2.5 and 0.3: ranks 3 2 1 and 2 3 1.
    assert found["rank_correlation"] == 0.5


def test_the_least_effect_is_that_at_which_the_test_turns():
    row = Row(ABLATIONS[0], [0.01, 0.02, 0.03, 0.02, 0.02], [1.0] * 5, [1.4] * 5)
    least = ledger_ablations.calibration([row])["smallest"][5]
    shift = least - row.difference
    for factor, shown in ((0.99, False), (1.01, True)):
        moved = [x + shift for x in row.differences]
        mean = sum(moved) / 5
        moved = [x + (factor - 1) * mean for x in moved]
        assert (stats.ttest_1samp(moved, 0).pvalue < 0.01) == shown


def test_page_and_picture_are_made_from_the_results(folder, capsys):
    assert ledger.main(["ablate", "--write"]) == 0
    text = (folder / "ablations.md").read_text()
    assert "| `gelu` | GELU in the place of ReLU² | 5 | +0.0520 ±" in text
    assert "2 have its sign here" in text.replace("\n", " ")
    assert (folder / "ablations.png").stat().st_size > 10_000
    found, notes = ledger_ablations.ablation_findings(folder, folder / "2026-01-01_Only")
    assert (found, notes) == ([], [])
    (folder / "ablations.md").write_text(text.replace("+0.0520", "+0.0020"))
    found, _ = ledger_ablations.ablation_findings(folder, folder / "2026-01-01_Only")
    assert found == ["ablations.md is not what `ablate --write` gives"]


def test_the_page_tells_what_the_rows_are_held_against(folder):
    kept = json.loads((folder / "ablations.json").read_text())
    kept["runs"]["175"]["as-it-is"]["5"] = {"val_loss": 1.71, "train_time_ms": 1000}
    kept["runs"]["90"] = {"as-it-is": {"0": {"val_loss": 1.85, "train_time_ms": 500}}}
    words = " ".join(ledger_ablations.page(kept).split())
    # Five seeds have a mean of 1.41; with 1.71 beside them it is 8.76 / 6.
    assert "ends at 1.4600" in words and "Of the first 5," in words and "mean is 1.4100:" in words
    # Of the three with a published effect two have means above 1.41, but only one above 1.46.
    assert "2 have its sign here" in words
    assert "Held against all 6 runs of the script as it is," in words
    assert "1 of the 3 have their sign" in words
    assert words.index("## 90 steps") < words.index("## 175 steps")
    not_run = words[words.index("Not run yet") :]
    assert "`adam`" in not_run and "`gelu`" not in not_run


def test_results_of_another_script_are_told_and_not_mixed(folder):
    script = folder / "2026-01-01_Only" / "train_gpt.py"
    script.write_text(ROOT.replace("mlp_ratio: int = 4", "mlp_ratio: int = 3"))
    assert ledger.main(["ablate", "--write"]) == 0
    _, notes = ledger_ablations.ablation_findings(folder, script.parent)
    assert notes == ["ablations.json: measured with another script than 2026-01-01_Only's"]
    ledger_ablations.keep(folder / "ablations.json", script.parent, "lab", [])
    assert json.loads((folder / "ablations.json").read_text())["runs"] == {}


def test_without_results_the_command_that_makes_them_is_told(folder, capsys):
    (folder / "ablations.json").unlink()
    assert ledger.main(["ablate", "--write"]) == 2
    assert "`ablate --seeds 5` makes them" in capsys.readouterr().err
