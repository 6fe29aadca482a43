"""The ledger reads the public lineage's logs in all their forms; what it cannot use is one line.

The logs are small ones in those forms, written by the tests; what is published is their oracle.
"""

import json
from pathlib import Path

import pytest
from fake_records import SCRIPT
from ledger import diff, pages, public
from ledger.__main__ import main
from scipy import stats

BASELINE = "baseline: 2024-10-14_ModernArch"
RULE = "=" * 100
FILE_RULE = "-" * 40
SOURCE = """import torch

class Hyperparameters:
    batch_size = 8*64
"""
OTHER = SOURCE.replace("8*64", "4*64")
JOINED = f"{SOURCE}\n\n{FILE_RULE}\n# kernels.py\n{FILE_RULE}\n\ndef kernel():\n    pass\n"
THREE = f"{JOINED}\n\n{FILE_RULE}\n# more.py\n{FILE_RULE}\n\nx = 1\n"
GPU = "|   0  NVIDIA H100 80GB HBM3          On  |   00000000:61:00.0 Off |       0 |\n"
PYTHON = "Running python 3.12.7 (main)\nRunning PyTorch 2.7.0.dev compiled for CUDA 12.6\n"
SMI = f"{PYTHON}nvidia-smi:\n{8 * GPU}"
PEERS = "[Gloo] Rank 3 is connected to 7 peer ranks. Expected number of connected peers: 7\n"
# The clock is set to zero after ten steps, and the steps around it have no average.
RESET = (
    "step:0/20 val_loss:10.8258 train_time:275ms step_avg:nanms\n"
    "step:1/20{loss} train_time:22693ms step_avg:nanms\n"
    "step:11/20{loss} train_time:94ms step_avg:nanms\n"
    "step:13/20{loss} train_time:283ms step_avg:94.48ms\n"
    "step:20/20 val_loss:3.2808 train_time:943ms step_avg:94.34ms\n")
TIMED = (
    "step:0/20 val_loss:10.8258 train_time:0ms step_avg:0.03ms\n"
    "step:1/20 train_time:94ms step_avg:94.00ms\n"
    "step:20/20 val_loss:3.2808 train_time:943ms step_avg:47.15ms\n")
FORMATS = {  # the source, and the log
    "untimed": ("", "s:0 tel:10.8258\ns:0 trl:10.8 lr:0.000001 norm:15.37\ns:20 tel:3.2808\n"),
    "ruled": (SOURCE, f"{RULE}\n{SOURCE}{RULE}\n{SMI}{RULE}\n"
              + RESET.format(loss=" train_loss:7.7")),
    "lossless": (SOURCE, f"{SOURCE}{RULE}\n{SMI}{RULE}\n{RESET.format(loss='')}"),
    "printed": (SOURCE, f"{SOURCE}\n{RULE}\n{PYTHON}{PEERS}\n{RULE}\n{TIMED}"),
    "joined": (THREE, f"{THREE}\n{RULE}\n{SMI}\n{RULE}\n{TIMED}"),
    "console": ("", f"Fetching 8 files: 100%\ncompile and warmup: 334.5s\n{TIMED.strip()}")}


def foreign(source: str, gpus: int = 8, loss: float = 3.2741, ms=943) -> str:
    """A log in a public form, of a run on so many GPUs."""
    lines = TIMED.replace("3.2808", f"{loss:.4f}").replace("943ms", f"{ms}ms")
    return f"{source}\n{RULE}\n{PYTHON}{gpus * GPU}\n{RULE}\n{lines}"


@pytest.mark.parametrize("name", FORMATS)
def test_every_public_format_is_read(name, tmp_path):
    source, text = FORMATS[name]
    (tmp_path / "log.txt").write_text(text)
    log = public.read_any(tmp_path / "log.txt")
    timed = name != "untimed"
    assert log.source == (source or None)
    assert {step: loss for step, (loss, _) in log.val.items()} == {0: 10.8258, 20: 3.2808}
    assert log.finished and not log.notes
    assert log.train_time_ms == (943 if timed else None)
    assert log.val[0][1] == (0 if timed else None)  # the first validation is not training
    assert (log.val_loss, log.last_step) == (3.2808, 20)
    told = [pages.time_to_loss("a", [log], loss) for loss in (3.28, 3.3)]
    assert [(one["step"], one["seconds"]) for one in told] == [
        (None, None), (20, 0.943 if timed else None)]
    if name in ("ruled", "lossless"):
        loss = 7.7 if name == "ruled" else None
        assert log.train == {1: (loss, None), 11: (loss, None), 13: (loss, 283)}
    if source:
        assert log.header["world_size"] == "8" and log.tokens_until(20) is None


def test_joined_files_are_told_apart():
    assert list(diff.split_files(THREE)) == ["train_gpt.py", "kernels.py", "more.py"]
    found = diff.diff_sources(JOINED, JOINED.replace("pass", "return"))
    assert [section["title"] for section in found["sections"]] == ["kernels.py: kernel"]


def write_logs(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def rows_of(folder, capsys) -> list[dict]:
    capsys.readouterr()
    assert main(["list", str(folder), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_no_source_is_run_nor_has_to_be_python(tmp_path, monkeypatch, capsys):
    """In any form it is listed and compared."""
    monkeypatch.chdir(tmp_path)
    trap = f"{SOURCE}x = __import__('pathlib').Path('trap').touch()\n"
    write_logs(tmp_path, {
        "a.txt": foreign(SOURCE), "b.txt": foreign(trap), "c.txt": foreign(SOURCE + "print 1\n")})
    assert len(rows_of(".", capsys)) == 3
    assert main(["curves", "a.txt", "b.txt", "c.txt"]) == 0
    for name in ("b.txt", "c.txt"):
        assert main(["diff", "a.txt", name]) == 0
        assert f"a.txt → {name}: +1 −0 lines" in capsys.readouterr().out
    assert not (tmp_path / "trap").exists()


@pytest.fixture
def lineage(tmp_path) -> Path:
    """Three folders: the second pools a baseline's, a 1-GPU and an 8-GPU run, and has a script."""
    root = tmp_path / "records/short"
    write_logs(root, {
        "2024-10-14_ModernArch/a.txt": foreign(SOURCE, ms=900_000),
        "2025-01-04-SoftCap/b.txt": foreign(SOURCE, loss=3.2811, ms=905_000),
        "2025-01-04-SoftCap/one/c.txt": foreign(OTHER, gpus=1, loss=3.2780, ms=594_000),
        "2025-01-04-SoftCap/d.txt": foreign(OTHER, loss=3.2770, ms=78_000),
        "2025-01-04-SoftCap/e.txt": foreign(OTHER, loss=3.2772, ms=78_200),
        "2025-01-04-SoftCap/analyze.py": "import json\nprint(json)\n",
        "2025-02-01_Named/baseline/f.txt": foreign(OTHER + "# again\n", loss=3.3),
        "2025-02-01_Named/baseline/g.txt": foreign(OTHER + "# again\n", loss=3.3),
        "2025-02-01_Named/ours/h.txt": foreign(OTHER + "x = 1\n", loss=3.2)})
    (root / "2025-03-01_Empty").mkdir()
    return root


def test_list_pools_only_runs_of_one_source_and_machine(lineage, capsys):
    rows = rows_of(lineage, capsys)
    assert [(row["folder"][11:], row["runs"], row["losses"], row["ranks"]) for row in rows] == [
        ("ModernArch", "record", [3.2741], 8), ("SoftCap", "record", [3.2770, 3.2772], 8),
        ("SoftCap", "1 rank(s) instead of 8", [3.2780], 1), ("SoftCap", BASELINE, [3.2811], 8),
        ("Named", "record", [3.2], 8), ("Named", "called a baseline", [3.3, 3.3], 8)]
    assert (rows[1]["steps"], round(rows[1]["minutes"], 5)) == (20, 1.30167)
    p = stats.ttest_1samp([3.2770, 3.2772], 3.28, alternative="less").pvalue
    assert rows[1]["p_target"] == pytest.approx(p) and rows[0]["p_target"] is None
    assert main(["list", str(lineage / "2025-01-04-SoftCap")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("SoftCap" in line for line in lines) == 3 and "Loss ± std (n)" in lines[0]
    assert BASELINE in lines[4] and all(len(line) <= 120 for line in lines)


def test_among_equals_the_record_is_what_meets_the_target(tmp_path, capsys):
    """2024-11-06 in public: of six scripts with a run each, an ablation that misses is fastest."""
    for name, loss, ms in (("a", 3.3274, 450_000), ("b", 3.2791, 493_000), ("c", 3.2799, 500_000)):
        log = foreign(f"{SOURCE}x = '{name}'\n", loss=loss, ms=ms)
        write_logs(tmp_path, {f"2024-11-06_Tweaks/{name}.txt": log})
    assert [(row["runs"], row["losses"]) for row in rows_of(tmp_path, capsys)] == [
        ("record", [3.2791]), ("another source", [3.2799]), ("another source", [3.3274])]


def test_the_log_that_the_lineages_readme_links_is_the_records(lineage, tmp_path, capsys):
    """#7 in public has the source of #6: its file is linked; of others a folder is."""
    write_logs(tmp_path, {
        "README.md": "1 | [log](records/short/2025-01-04-SoftCap/b.txt) | [PR](records/x)\n"
                     "2 | [logs](records/short/2025-02-01_Named/baseline)\n"
                     "3 | [log](records/short/2025-04-01_Whole)\n",
        "records/short/2025-04-01_Whole/old.txt": foreign(SOURCE),
        "records/short/2025-04-01_Whole/i.txt": foreign(OTHER + "x = 2\n")})
    told = [(row["folder"][11:], row["runs"], row["losses"]) for row in rows_of(lineage, capsys)]
    assert [(folder, losses) for folder, runs, losses in told if runs == "record"] == [
        ("ModernArch", [3.2741]), ("SoftCap", [3.2811]), ("Named", [3.3, 3.3]), ("Whole", [3.2741])]
    assert told[2] == ("SoftCap", "another source", [3.2770, 3.2772])


def test_diff_takes_the_records_source_from_a_folder_of_others(lineage, tmp_path, capsys):
    folders = [str(lineage / "2024-10-14_ModernArch"), str(lineage / "2025-01-04-SoftCap")]
    assert main(["diff", *folders, "--json"]) == 0
    (section,) = json.loads(capsys.readouterr().out)["sections"]
    changed = [line for line in section["lines"] if line[0] in "+-"]
    assert changed == ["-    batch_size = 8*64", "+    batch_size = 4*64"]
    # A script stands for a folder whose logs have no source.
    write_logs(tmp_path, {"a/log.txt": FORMATS["untimed"][1], "a/train_gpt2.py": SOURCE})
    assert public.source_of(str(tmp_path / "a")) == SOURCE


def test_curves_are_named_by_their_record(lineage, capsys):
    folder = lineage / "2025-01-04-SoftCap"
    earlier = "step:19/20 val_loss:3.1000 train_time:1ms step_avg:1.00ms\nstep:20/20"
    (folder / "e.txt").write_text(foreign(OTHER, loss=3.2).replace("step:20/20", earlier))
    operands = [folder, folder / "e.txt", lineage / "2024-10-14_ModernArch/a.txt"]
    assert main(["curves", *map(str, operands), "--json"]) == 0
    out, err = capsys.readouterr()
    assert f"log(s) are left out, {BASELINE}" in err
    rows = json.loads(out)
    assert {row["name"] for row in rows} == {"SoftCap", str(folder / "e.txt"), "ModernArch"}
    assert [row["step"] for row in rows if row["reached"] == 2] == [19.5]


def test_curves_are_drawn_without_times_and_of_what_is_finite(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_logs(tmp_path, {"onelog.txt": FORMATS["untimed"][1], "a/log.txt": FORMATS["ruled"][1],
                          "b/bad.txt": TIMED.replace("3.2808", "nan"), "b/prose.txt": "nothing\n"})
    assert main(["curves", "onelog.txt", "--png", "one.png"]) == 0
    capsys.readouterr()
    assert main(["curves", "onelog.txt", "a/log.txt", "b", "--png", "all.png", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "1 of 2 files are not used" in err and (tmp_path / "all.png").stat().st_size > 20_000
    rows = json.loads(out)
    assert [row["name"] for row in rows] == ["onelog", "a", "b"]  # one called log has its folder's
    assert (rows[2]["target"], rows[2]["seconds"], rows[2]["reached"]) == (3.28, None, 0)
    assert rows[2]["losses"] == [10.8258]


@pytest.mark.parametrize("command, words", [
    ("diff console.txt console.txt", "no source in it"),
    ("diff a.py spoiled", "spoiled is a folder of records; give one of its folders"),
    ("curves nowhere", "No such file"),
    ("curves blank.txt", "blank.txt is empty"),
    ("curves binary.bin", "binary.bin: byte 1 is not text"),
    ("curves prose.txt", "prose.txt has no training steps"),
    ("curves cut.txt", "cut inside its source"),
    ("curves folder", "no log with validation losses"),
    ("curves steps.txt", "no validation"),
    ("curves log.txt --png no/such/out.png", "no/such/out.png: No such file"),
    ("curves", "required: A"),
    ("list folder", "folder has no records and no logs; give a folder that has"),
    ("verify spoiled", "is no record.json"),
    ("verify folder", "folder has no record.json; give records/ or a record"),
    ("verify missing/2026-01-01_X", "no such folder"),
    ("curves log.txt --target 0", "--target: 0 is not a loss; give a finite one above 0"),
    ("curves log.txt --target inf", "--target: inf is not a loss"),
    ("run a.py:val_tokens=2048 a.py", "a.py validates on val_tokens 262144, a.py:val_tokens=2048 "
     "on 2048: losses on other tokens do not compare"),
    ("run a.py a.py:val_files=x.bin", "a.py:val_files=x.bin validates on val_files x.bin, a.py on"),
    ("verify --replay 0", "--replay: 0 is not a whole number"),
    ("run a.py a.py", "the script and the settings of a.py"),
    ("run a.py:loss=2 b.py:loss=2", "settings of a.py:l"),
    ("run a.py a.py:muon_lr=5e-2", "settings of a.py"),  # what the preset says already
    ("run a.py a.py:seed=3", "seed is the ledger's; use --preset or --seeds"),
    ("run a.py a.py:lr=3", "a.py: --lr 3: no such"),
    ("run a.py:muon_lr=x", "could not convert string to float: 'x'"),
    ("run a.py --preset large", "'large'"),
    ("run a.py:muon_lr", "'muon_lr' is no flag"),
    ("run folder", "folder: no script there"),
    ("run a.py bad.py", "bad.py: invalid syntax"),
    ("run a.py --jobs 0", "--jobs: 0 is not a whole number"),
    ("run a.py --out a.py/out", "a.py/out"),
    ("book folder --out site", "no records there, so no pages; give a folder that has")])
def test_bad_input_is_answered_in_one_line(command, words, tmp_path, monkeypatch, capsys):
    """And nothing is run or written."""
    monkeypatch.chdir(tmp_path)
    write_logs(tmp_path, {
        "blank.txt": "\n \n", "prose.txt": "It was a dark night.\n",
        "cut.txt": SOURCE[:40], "console.txt": TIMED, "a.py": SCRIPT, "b.py": SCRIPT,
        "bad.py": "def parse_args(:\n", "steps.txt": "step:1/2 train_time:1ms step_avg:1.00ms\n",
        "log.txt": FORMATS["joined"][1], "spoiled/2026-01-01_X/record.json": '{"number": '})
    (tmp_path / "binary.bin").write_bytes(b"a\xff\xfe")
    (tmp_path / "folder").mkdir()
    try:
        status = main(command.split())
    except SystemExit as error:
        status = error.code
    err = capsys.readouterr().err
    assert status == 2 and words in err and err.count("\n") == 1, err
    assert not (tmp_path / "logs").exists() and not (tmp_path / "site").exists()
