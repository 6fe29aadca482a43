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

pytest_plugins = ["record_fixtures"]

RULE = "=" * 100

SOURCE = """import torch

class Hyperparameters:
    batch_size = 8*64
    sequence_length = 1024
"""
SMI = "Sat Feb  1 20:42:40 2025\n" + "".join(
    f"|   {i}  NVIDIA H100 80GB HBM3          On  |   00000000:61:00.0 Off |       0 |\n"
    for i in range(8))
TORCH = "Running pytorch 2.4.1+cu121 compiled for CUDA 12.1\nnvidia-smi:\n"
PYTHON = "Running python 3.12.7 (main)\nRunning PyTorch 2.7.0.dev compiled for CUDA 12.6\n"
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
FILE_RULE = "-" * 40
JOINED = f"{SOURCE}\n\n{FILE_RULE}\n# kernels.py\n{FILE_RULE}\n\ndef kernel():\n    pass\n"
THREE = f"{JOINED}\n\n{FILE_RULE}\n# more.py\n{FILE_RULE}\n\nx = 1\n"
FORMATS = {
    "A": ("", "s:0 tel:10.8258\ns:0 trl:10.8 lr:0.000001 norm:15.37\ns:20 tel:3.2808\n"),
    "B": (SOURCE, f"{RULE}\n{SOURCE}{RULE}\n{TORCH}{SMI}{RULE}\n"
          + RESET.format(loss=" train_loss:7.7")),
    "C": (SOURCE, f"{SOURCE}{RULE}\n{TORCH}{SMI}{RULE}\n" + RESET.format(loss=" train_loss:7.7")),
    "D": (SOURCE, f"{SOURCE}{RULE}\n{TORCH}{SMI}{RULE}\n" + RESET.format(loss="")),
    "E": (SOURCE, f"{SOURCE}\n{RULE}\n{PYTHON}{SMI}{RULE}\n" + RESET.format(loss="")
          + "peak memory consumption: 31563 MiB\n"),
    "F": (SOURCE, f"{SOURCE}\n{RULE}\n{PYTHON}{SMI}\n{RULE}\n" + RESET.format(loss="")
          + "peak memory allocated: 31563 MiB reserved: 44552 MiB\n"),
    "G": (SOURCE, f"{SOURCE}\n{RULE}\n{PYTHON}{SMI}\n{RULE}\n{TIMED}"
          "peak memory allocated: 31563 MiB reserved: 44552 MiB\n"),
    "H2": (JOINED, f"{JOINED}\n{RULE}\n{PYTHON}{SMI}\n{RULE}\n{TIMED}"),
    "H3": (THREE, f"{THREE}\n{RULE}\n{PYTHON}{SMI}\n{RULE}\n{TIMED}"),
    "console": ("", "Fetching 8 files: 100%\ncompile and warmup: 334.5s\n" + TIMED.strip())}


def foreign(source: str, steps: int = 20, gpus: int = 8, loss: float = 3.2741, ms=943) -> str:
    """A log in a public form, of so many steps on so many GPUs."""
    smi = "".join(line + "\n" for line in SMI.splitlines()[: 1 + gpus])
    lines = TIMED.replace("/20 ", f"/{steps} ").replace("step:20/", f"step:{steps}/")
    lines = lines.replace("3.2808", f"{loss:.4f}").replace("943ms", f"{ms}ms")
    return f"{source}\n{RULE}\n{PYTHON}{smi}\n{RULE}\n{lines}"


def read(folder: Path, text: str):
    (folder / "log.txt").write_text(text)
    return public.read_any(folder / "log.txt")


@pytest.mark.parametrize("name", FORMATS)
def test_every_public_format_is_read(name, tmp_path):
    source, text = FORMATS[name]
    log = read(tmp_path, text)
    assert log.source == (source or None)
    assert {step: loss for step, (loss, _) in log.val.items()} == {0: 10.8258, 20: 3.2808}
    assert log.finished and not log.notes
    assert log.train_time_ms == (None if name == "A" else 943)
    assert log.val[0][1] == (None if name == "A" else 0)  # the first validation is not training
    assert (log.val_loss, log.last_step) == (3.2808, 20)
    told = [pages.time_to_loss("a", [log], loss) for loss in (3.28, 3.3)]
    seconds = None if name == "A" else 0.943
    assert [(one["step"], one["seconds"]) for one in told] == [(None, None), (20, seconds)]
    if name in "BC":
        assert log.train == {1: (7.7, None), 11: (7.7, None), 13: (7.7, 283)}
    if name in "DEF":
        assert log.train == {1: (None, None), 11: (None, None), 13: (None, 283)}
    if source:
        assert log.header["world_size"] == "8" and log.tokens_until(20) is None


def test_joined_files_are_told_apart():
    assert list(diff.split_files(THREE)) == ["train_gpt.py", "kernels.py", "more.py"]
    found = diff.diff_sources(JOINED, JOINED.replace("pass", "return"))
    assert [section["title"] for section in found["sections"]] == ["kernels.py: kernel"]


@pytest.mark.parametrize("line", [
    "TRAINING_STAGES = 5", "TRAINING_STAGES = [1, 2]", "batch_size = 9**9**9**9",
    "TRAINING_STAGES = [TrainingStage(duration=[1], batch_size=2)]", "x = 1e999",
    "num_scheduled_iterations = [1, 2]", f"x = {'*'.join(['2'] * 3000)}",
    "x = __import__('pathlib').Path('trap').touch()"])
def test_nothing_of_a_source_is_run_or_computed(line, tmp_path, monkeypatch, capsys):
    """In any form it is listed and compared."""
    monkeypatch.chdir(tmp_path)
    for name, source in (("a.txt", SOURCE), ("b.txt", f"{SOURCE}    {line}\n")):
        (tmp_path / name).write_text(foreign(source))
    assert main(["list", "."]) == 0 and main(["curves", "a.txt", "b.txt"]) == 0
    assert main(["diff", "a.txt", "b.txt"]) == 0
    assert not (tmp_path / "trap").exists()


def write_logs(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def lineage_of_others(root: Path) -> Path:
    """Three folders: the second pools a baseline's, a 1-GPU and an 8-GPU run, and has a script."""
    old, new = SOURCE, SOURCE.replace("8*64", "4*64")
    write_logs(root, {
        "2024-10-14_ModernArch/a.txt": foreign(old, ms=900_000).replace("2025", "2024"),
        "2025-01-04-SoftCap/b.txt": foreign(old, loss=3.2811, ms=905_000),
        "2025-01-04-SoftCap/one/c.txt": foreign(new, gpus=1, loss=3.2780, ms=594_000),
        "2025-01-04-SoftCap/d.txt": foreign(new, loss=3.2770, ms=78_000),
        "2025-01-04-SoftCap/e.txt": foreign(new, loss=3.2772, ms=78_200),
        "2025-01-04-SoftCap/analyze.py": "import json\nprint(json)\n",
        "2025-02-01_Named/baseline/f.txt": foreign(new + "# again\n", loss=3.3),
        "2025-02-01_Named/baseline/g.txt": foreign(new + "# again\n", loss=3.3),
        "2025-02-01_Named/ours/h.txt": foreign(new + "x = 1\n", loss=3.2)})
    (root / "2025-03-01_Empty").mkdir()
    return root


def rows_of(folder: Path, capsys) -> list[dict]:
    capsys.readouterr()
    assert main(["list", str(folder), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_list_pools_only_runs_of_one_source_and_machine(tmp_path, capsys):
    root = lineage_of_others(tmp_path)
    rows = rows_of(root, capsys)
    baseline = "baseline: 2024-10-14_ModernArch"
    assert [(row["folder"], row["runs"], len(row["losses"]), row["ranks"]) for row in rows] == [
        ("2024-10-14 ModernArch", "record", 1, 8), ("2025-01-04 SoftCap", "record", 2, 8),
        ("2025-01-04 SoftCap", "1 rank(s) instead of 8", 1, 1),
        ("2025-01-04 SoftCap", baseline, 1, 8), ("2025-02-01 Named", "record", 1, 8),
        ("2025-02-01 Named", "called a baseline", 2, 8)]
    second = rows[1]
    assert (second["losses"], round(second["minutes"], 5)) == ([3.2770, 3.2772], 1.30167)
    p = stats.ttest_1samp([3.2770, 3.2772], 3.28, alternative="less").pvalue
    assert second["p_target"] == pytest.approx(p) and rows[0]["p_target"] is None
    assert second["steps"] == 20
    assert main(["list", str(root / "2025-01-04-SoftCap")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("SoftCap" in line for line in lines) == 3 and "Loss ± std (n)" in lines[0]
    assert baseline in lines[4] and all(len(line) <= 120 for line in lines)


def test_among_equals_the_record_is_what_meets_the_target(tmp_path, capsys):
    """2024-11-06 in public: of six scripts with a run each, an ablation that misses is fastest."""
    sources = [SOURCE + f"x = {i}\n" for i in range(3)]
    write_logs(tmp_path, {
        "2024-11-06_Tweaks/a.txt": foreign(sources[0], loss=3.3274, ms=450_000),
        "2024-11-06_Tweaks/b.txt": foreign(sources[1], loss=3.2791, ms=493_000),
        "2024-11-06_Tweaks/c.txt": foreign(sources[2], loss=3.2799, ms=500_000)})
    rows = rows_of(tmp_path, capsys)
    assert [row["runs"] for row in rows] == ["record", "another source", "another source"]
    assert [row["losses"] for row in rows] == [[3.2791], [3.2799], [3.3274]]


def test_the_log_that_the_lineages_readme_links_is_the_records(tmp_path, capsys):
    """#7 in public has the source of #6: its file is linked; of others a folder is."""
    root = lineage_of_others(tmp_path / "records/short")
    new = SOURCE.replace("8*64", "4*64")
    write_logs(tmp_path, {
        "README.md": "1 | [log](records/short/2025-01-04-SoftCap/b.txt) | [PR](records/x)\n"
                     "2 | [logs](records/short/2025-02-01_Named/baseline)\n"
                     "3 | [log](records/short/2025-04-01_Whole)\n",
        "records/short/2025-04-01_Whole/old.txt": foreign(SOURCE),
        "records/short/2025-04-01_Whole/i.txt": foreign(new + "x = 2\n")})
    told = [(row["folder"][11:], row["runs"], row["losses"]) for row in rows_of(root, capsys)]
    baseline = "baseline: 2024-10-14_ModernArch"
    assert told == [
        ("ModernArch", "record", [3.2741]), ("SoftCap", "record", [3.2811]),
        ("SoftCap", "another source", [3.2770, 3.2772]),
        ("SoftCap", "1 rank(s) instead of 8", [3.2780]), ("Named", "record", [3.3, 3.3]),
        ("Named", "another source", [3.2]), ("Whole", "record", [3.2741]),
        ("Whole", baseline, [3.2741])]


def test_diff_takes_the_records_source_from_a_folder_of_others(tmp_path, capsys):
    root = lineage_of_others(tmp_path)
    folders = [str(root / "2024-10-14_ModernArch"), str(root / "2025-01-04-SoftCap")]
    assert main(["diff", *folders, "--json"]) == 0
    (section,) = json.loads(capsys.readouterr().out)["sections"]
    changed = [line for line in section["lines"] if line[0] in "+-"]
    assert changed == ["-    batch_size = 8*64", "+    batch_size = 4*64"]


def test_a_script_stands_for_a_folder_whose_logs_have_no_source(tmp_path):
    (tmp_path / "log.txt").write_text(FORMATS["A"][1])
    (tmp_path / "train_gpt2.py").write_text(SOURCE)
    assert public.source_of(str(tmp_path)) == SOURCE



def test_curves_of_logs_without_times_are_drawn_where_they_can(tmp_path, capsys):
    for letter in "AF":
        (tmp_path / f"{letter}.txt").write_text(FORMATS[letter][1])
    png = tmp_path / "out.png"
    operands = [str(tmp_path / f"{letter}.txt") for letter in "AF"]
    assert main(["curves", *operands, "--png", str(png)]) == 0
    out, err = capsys.readouterr()
    assert "below the loss 3.28" in out and png.stat().st_size > 20_000
    assert main(["curves", operands[0], "--png", str(png)]) == 0


def test_curves_are_named_by_their_record(tmp_path, capsys):
    folder = lineage_of_others(tmp_path) / "2025-01-04-SoftCap"
    text = foreign(SOURCE.replace("8*64", "4*64"), loss=3.2)
    earlier = "step:19/20 val_loss:3.1000 train_time:1ms step_avg:1.00ms\nstep:20/20"
    (folder / "e.txt").write_text(text.replace("step:20/20", earlier))
    operands = [folder, folder / "e.txt", tmp_path / "2024-10-14_ModernArch" / "a.txt"]
    assert main(["curves", *map(str, operands), "--json"]) == 0
    out, err = capsys.readouterr()
    assert "log(s) are left out, baseline: 2024-10-14_ModernArch" in err
    rows = json.loads(out)
    assert {row["name"] for row in rows} == {"SoftCap", str(folder / "e.txt"), "ModernArch"}
    assert [row["step"] for row in rows if row["reached"] == 2] == [19.5]


def test_a_log_keeps_its_name_and_one_called_log_has_its_folders(tmp_path):
    for name in ("onelog.txt", "log.txt"):
        (tmp_path / name).write_text(FORMATS["F"][1])
    names = [public.logs_of(str(tmp_path / name))[0] for name in ("onelog.txt", "log.txt")]
    assert names == ["onelog", tmp_path.name]


def test_curves_leave_out_what_is_not_finite(tmp_path, capsys):
    (tmp_path / "bad.txt").write_text(TIMED.replace("3.2808", "nan"))
    (tmp_path / "prose.txt").write_text("nothing\n")
    png = tmp_path / "out.png"
    assert main(["curves", str(tmp_path), "--png", str(png), "--json"]) == 0
    out, err = capsys.readouterr()
    assert "1 of 2 files are not used" in err and png.exists()
    row = json.loads(out)[-1]
    assert (row["target"], row["seconds"], row["reached"], row["n"]) == (3.28, None, 0, 1)


@pytest.mark.parametrize("command, words", [
    ("diff nowhere here", "nowhere"),
    ("diff console.txt console.txt", "no source in it"),
    ("diff folder folder", "no log with validation losses"),
    ("diff a.py spoiled", "spoiled is a folder of records; give one of its folders"),
    ("curves nowhere", "No such file"),
    ("curves empty.txt", "empty.txt is empty"),
    ("curves blank.txt", "blank.txt is empty"),
    ("curves binary.bin", "binary.bin: byte 1 is not text"),
    ("curves prose.txt", "prose.txt has no training steps"),
    ("curves cut.txt", "cut inside its source"),
    ("curves folder", "no log with validation losses"),
    ("curves steps.txt", "no validation"),
    ("curves log.txt --png no/such/out.png", "no/such/out.png: No such file"),
    ("curves log.txt --png folder", "folder: Is a directory"),
    ("curves", "required: A"),
    ("list nowhere", "nowhere: no such folder"),
    ("list folder", "folder has no records and no logs; give a folder that has"),
    ("verify nowhere", "nowhere: no such folder"),
    ("verify spoiled", "is no record.json"),
    ("verify folder", "folder has no record.json; give records/ or a record"),
    ("verify missing/2026-01-01_X", "no such folder"),
    ("curves log.txt --target 0", "--target: 0 is not a loss; give a finite one above 0"),
    ("curves log.txt --target nan", "--target: nan is not a loss"),
    ("curves log.txt --target inf", "--target: inf is not a loss"),
    ("curves log.txt --target -1", "--target"),
    ("run a.py:val_tokens=2048 a.py", "a.py validates on val_tokens 262144, a.py:val_tokens=2048 "
     "on 2048: losses on other tokens do not compare"),
    ("run a.py a.py:val_files=x.bin", "a.py:val_files=x.bin validates on val_files x.bin, a.py on"),
    ("verify --replay 0", "--replay: 0 is not a whole number"),
    ("run a.py a.py", "the script and the settings of a.py"),
    ("run a.py:loss=2 b.py:loss=2", "settings of a.py:l"),
    ("run a.py a.py:muon_lr=5e-2", "settings of a.py"),  # what the preset says already
    ("run a.py a.py:seed=3", "seed is the ledger's; use --preset or --seeds"),
    ("run a.py:run_id=x", "run_id is the ledger's"),
    ("run a.py a.py:preset=record", "preset is the ledger's"),
    ("run a.py a.py:lr=3", "a.py: --lr 3: no such"),
    ("run a.py:muon_lr=x", "could not convert string to float: 'x'"),
    ("run a.py --preset large", "'large'"),
    ("run a.py:muon_lr", "'muon_lr' is no flag"),
    ("run c.py:muon_lr=1", "c.py:muon_lr=1: no script there"),
    ("run folder", "folder: no script there"),
    ("run a.py bad.py", "bad.py: invalid syntax"),
    ("run a.py --jobs 0", "--jobs: 0 is not a whole number"),
    ("run a.py --seeds 0", "--seeds: 0 is not a whole number"),
    ("run a.py --out a.py/out", "a.py/out"),
    ("frobnicate", "frobnicate")])
def test_bad_input_is_answered_in_one_line(command, words, tmp_path, monkeypatch, capsys):
    """And nothing is run."""
    monkeypatch.chdir(tmp_path)
    write_logs(tmp_path, {
        "empty.txt": "", "blank.txt": "\n \n", "prose.txt": "It was a dark night.\n",
        "cut.txt": SOURCE[:60], "console.txt": TIMED, "a.py": SCRIPT, "b.py": SCRIPT,
        "bad.py": "def parse_args(:\n", "steps.txt": "step:1/2 train_time:1ms step_avg:1.00ms\n",
        "log.txt": FORMATS["G"][1], "spoiled/2026-01-01_X/record.json": '{"number": '})
    (tmp_path / "binary.bin").write_bytes(b"a\xff\xfe")
    (tmp_path / "folder").mkdir()
    try:
        status = main(command.split())
    except SystemExit as error:
        status = error.code
    err = capsys.readouterr().err
    assert status == 2 and words in err and err.count("\n") == 1, err
    assert not (tmp_path / "logs").exists()


def test_sources_that_cannot_be_parsed_are_compared():
    found = diff.diff_sources("import os\nprint 1\n", "import os\nprint(1)\n")
    assert (found["added"], found["removed"]) == (1, 1)
