"""data/plan.py: processes, flags for small GPUs, and data, of the root and of records."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import plan as plan_tool
import pytest
from conftest import REPO, script_module

import train_gpt


def flags_of(sequences):
    """The flags that the page has for sequences of half the length, a quarter or an eighth."""
    page = (REPO / "docs" / "gpus.md").read_text()
    return re.search(rf'^{sequences}="(.*)"$', page, re.MULTILINE)[1]


@pytest.mark.parametrize(("gib", "flags", "planned"), [
    # GPUs, processes, how many there could be, sequences of a step; they divide these
    (3 * "80 ", "--seed 1", "3 2 3 8 \nfineweb.py 8\n"),
    (8 * "80 ", "--sequences_per_step 12", "8 6 8 12 \nfineweb.py 8\n"),
    (4 * "80 ", "--preset pocket", "4 1 1 8 \npocket.py\n"),
    ("80", "--train_files mine/*.bin", "1 1 1 8 \n\n"),
    # The smallest GPU sets the length of the sequences, unless flags do.
    ("22.0", "", "1 1 1 8 \nfineweb.py 8\n"),
    ("79.1 15.6 79.1", "", f"3 2 3 16 {flags_of('half')}\nfineweb.py 8\n"),
    ("9.6", "--seed 3", f"1 1 1 32 {flags_of('quarter')}\nfineweb.py 8\n"),
    ("7.7", "", f"1 1 1 64 {flags_of('eighth')}\nfineweb.py 8\n"),
    ("7.7", "--sequences_per_step=16", "1 1 1 16 \nfineweb.py 11\n"),
    ("5.8", "--preset pocket", "1 1 1 8 \npocket.py\n"),
    ("5.8", "", "1 1 1 8 none\nfineweb.py 8\n")])
def test_the_root_is_planned_for_the_gpus_that_there_are(monkeypatch, capsys, gib, flags, planned):
    gpus = [SimpleNamespace(total_memory=int(float(size) * 2**30)) for size in gib.split()]
    monkeypatch.setattr(train_gpt, "count_gpus", lambda device: len(gpus))
    monkeypatch.setattr(train_gpt, "check_gpu_machine", lambda processes: None)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: gpus[index])
    plan_tool.plan(flags.split())
    assert capsys.readouterr().out == planned


def test_wrong_flags_are_one_line():
    """As run.sh calls it, which finds the trainer by its folder alone."""
    command = [sys.executable, "-P", REPO / "data" / "plan.py", "--sede", "3"]
    done = subprocess.run(command, env=os.environ | dict(PYTHONPATH=str(REPO)), text=True,
                          capture_output=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("run.sh: ") and "--sede 3" in done.stderr
    assert done.stderr.count("\n") == 1


def lengths_of(cfg):
    return [row.seq_len for row in getattr(cfg, "stages", [cfg])]


@pytest.mark.parametrize(("record", "data"), [  # all that its steps take, at least eight shards
    ("2024-10-14_ModernArch", ["fineweb.py 27"]),
    ("2024-11-03_UntieEmbed", ["fineweb.py 25"]),
    ("2025-01-13_Fp8LmHead", ["fineweb.py 8"]),
    ("2025-12-22_MultiTokenPrediction", ["fineweb.py 8"]),
    ("2026-07-13_PrefixTargets", ["prefixes.py", "fineweb.py 8"]),
    ("2026-08-30_92g_NgramTable", ["prefixes.py", "canonical.py", "fineweb.py 8"])])
def test_records_are_planned_with_their_data_and_for_a_small_gpu(monkeypatch, tmp_path, record,
                                                                 data):
    """The tokens of its steps stay what they were."""
    script = script_module(f"records/{record}/train_gpt.py")
    monkeypatch.setattr(plan_tool, "train_gpt", script)
    cfg = script.parse_args([])
    for gib, parts in (79.1, 1), (15.6, 2), (11.6, 4), (7.7, 8):
        flags = plan_tool.flags_that_fit(cfg, gib)
        assert bool(flags) == (parts > 1)
        small = script.parse_args(flags.split())
        for found, before in zip(lengths_of(small), lengths_of(cfg), strict=True):
            at_once = before * cfg.sequences_per_forward
            assert found * small.sequences_per_forward * parts == at_once
            assert found * small.sequences_per_step == before * cfg.sequences_per_step
    monkeypatch.setattr(plan_tool, "__file__", f"{tmp_path}/data/plan.py")
    assert plan_tool.scripts_of_data(cfg) == data
    for table in plan_tool.TABLES:  # which are not made again
        (tmp_path / table).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / table).touch()
    assert plan_tool.scripts_of_data(cfg) == data[-1:]
