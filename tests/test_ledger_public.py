"""The ledger reads the public lineage's logs in all their forms, and tells what they are.

The logs are small ones in those forms, written by the tests; what is published is their oracle.
"""

import json
import sys
from pathlib import Path

import pytest
from scipy import stats

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "records"))

import ledger  # noqa: E402
import ledger_groups  # noqa: E402
import ledger_logs  # noqa: E402
import ledger_pictures  # noqa: E402
import ledger_sources  # noqa: E402

RULE = "=" * 100

SOURCE = """import torch

class Hyperparameters:
    batch_size = 8*64
    sequence_length = 1024
"""
SMI = "Sat Feb  1 20:42:40 2025\n" + "".join(
    f"|   {i}  NVIDIA H100 80GB HBM3          On  |   00000000:61:00.0 Off |       0 |\n"
    for i in range(8)
)
TORCH = "Running pytorch 2.4.1+cu121 compiled for CUDA 12.1\nnvidia-smi:\n"
PYTHON = "Running python 3.12.7 (main)\nRunning PyTorch 2.7.0.dev compiled for CUDA 12.6\n"
# The clock is set to zero after ten steps, and the steps around it have no average.
RESET = (
    "step:0/20 val_loss:10.8258 train_time:275ms step_avg:nanms\n"
    "step:1/20{loss} train_time:22693ms step_avg:nanms\n"
    "step:11/20{loss} train_time:94ms step_avg:nanms\n"
    "step:13/20{loss} train_time:283ms step_avg:94.48ms\n"
    "step:20/20 val_loss:3.2808 train_time:943ms step_avg:94.34ms\n"
)
TIMED = (
    "step:0/20 val_loss:10.8258 train_time:0ms step_avg:0.03ms\n"
    "step:1/20 train_time:94ms step_avg:94.00ms\n"
    "step:20/20 val_loss:3.2808 train_time:943ms step_avg:47.15ms\n"
)
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
    "console": ("", "Fetching 8 files: 100%\ncompile and warmup: 334.5s\n" + TIMED),
}  # fmt: skip


def foreign(source: str, steps: int = 20, gpus: int = 8, loss: float = 3.2741, ms=943) -> str:
    """A log in a public form, of so many steps on so many GPUs."""
    smi = "".join(line + "\n" for line in SMI.splitlines()[: 1 + gpus])
    lines = TIMED.replace("/20 ", f"/{steps} ").replace("step:20/", f"step:{steps}/")
    lines = lines.replace("3.2808", f"{loss:.4f}").replace("943ms", f"{ms}ms")
    return f"{source}\n{RULE}\n{PYTHON}{smi}\n{RULE}\n{lines}"


# -----------------------------------------------------------------------------
# Forms
# -----------------------------------------------------------------------------

@pytest.mark.parametrize("name", FORMATS)
def test_every_public_format_is_read(name, tmp_path):
    source, text = FORMATS[name]
    path = tmp_path / f"{name}.txt"
    path.write_text(text)
    log = ledger_logs.read_log(path)
    assert log.source == (source or None)
    assert {step: loss for step, (loss, _) in log.val.items()} == {0: 10.8258, 20: 3.2808}
    assert log.finished and not log.notes
    assert log.train_time_ms == (None if name == "A" else 943)
    assert log.val[0][1] == (None if name == "A" else 0)  # the first validation is not training
    assert (log.val_loss, log.last_step) == (3.2808, 20)
    assert log.reach(3.28) is None and log.reach(3.3) == (20, log.train_time_ms)
    if name in "BC":
        assert log.train == {1: (7.7, None), 11: (7.7, None), 13: (7.7, 283)}
    if name in "DEF":
        assert log.train == {1: (None, None), 11: (None, None), 13: (None, 283)}
    if source:
        assert log.header["device"] == "8x NVIDIA H100 80GB HBM3"
        assert log.header["torch"] == ("2.4.1+cu121" if name in "BCD" else "2.7.0.dev")
        assert log.tokens_per_step == 524288
    if name in "EFG":
        assert log.final["peak_memory_mib"] == "31563"


def test_joined_files_are_told_apart(tmp_path, capsys):
    path = tmp_path / "h.txt"
    path.write_text(FORMATS["H3"][1])
    assert ledger.main(["extract", str(path)]) == 0
    out, err = capsys.readouterr()
    assert out == THREE
    assert "3 files joined: train_gpt.py, kernels.py, more.py" in err and err.count("\n") == 1
    assert ledger.main(["extract", str(path), "--file", "more.py"]) == 0
    assert capsys.readouterr().out.strip() == "x = 1"


def test_diff_of_joined_and_unparsable_sources():
    diff = ledger_sources.diff_sources(JOINED, JOINED.replace("pass", "return"))
    assert [section["title"] for section in diff["sections"]] == ["kernels.py: kernel"]
    assert diff["definitions"]["changed"] == ["kernels.py: kernel"]
    diff = ledger_sources.diff_sources("import os\nprint 1\n", "import os\nprint(1)\n")
    assert (diff["added"], diff["removed"]) == (1, 1) and diff["notes"][0].startswith("A: ")


def test_a_number_cut_short_is_not_used(tmp_path):
    path = tmp_path / "log.txt"
    for cut in range(1, len("0.05ms\n")):
        path.write_text((TIMED + "step:9/20 val_loss:1.1 train_time:9ms step_avg:0.05ms\n")[:-cut])
        assert (9 in ledger_logs.read_log(path).val) == (cut == 1), cut


# -----------------------------------------------------------------------------
# Tokens
# -----------------------------------------------------------------------------

@pytest.mark.parametrize(
    "fields, tokens",
    [
        ("batch_size = 8*64*1024", 8 * 64 * 1024),
        ("batch_size : int = 8*64\n    sequence_length : int = 1024", 8 * 64 * 1024),
        ("train_seq_len = 48*1024", 8 * 48 * 1024),  # one sequence a device
        ("train_batch_size: int = 2048 * 24 * 8", 2048 * 24 * 8),
        ("stages = (1, 2)", None),
        ("batch_size = 8", None),  # sequences of unknown length
    ],
)
def test_tokens_of_a_step_come_from_the_source(fields, tokens, tmp_path):
    path = tmp_path / "log.txt"
    source = f"import torch\nclass Hyperparameters:\n    {fields}\n"
    path.write_text(f"{source}\n{RULE}\n{PYTHON}{SMI}\n{RULE}\n{TIMED}")
    assert ledger_logs.read_log(path).tokens_per_step == tokens


def test_gradients_summed_on_one_gpu_are_of_the_tokens_of_eight(tmp_path):
    source = "import torch\nclass Hyperparameters:\n    train_seq_len = 48*1024\n"
    source += "world_size = 1\ngrad_accum_steps = 8 // world_size\n"
    (tmp_path / "log.txt").write_text(foreign(source, gpus=1))
    assert ledger_logs.read_log(tmp_path / "log.txt").tokens_per_step == 8 * 48 * 1024


# Published of the record of 2025-12-18: 2,090 steps, 552,992,768 tokens.
SCHEDULE = """import torch
class Hyperparameters:
    train_bs_schedule: tuple = (8 * 2048 * 8, 16 * 2048 * 8, 24 * 2048 * 8)
    train_bs_extension: int = 24 * 2048 * 8
    num_scheduled_iterations: int = 2050
    num_extension_iterations: int = 40
"""
STAGES = """import torch
class Hyperparameters:
    num_scheduled_iterations: int = 2050
args = Hyperparameters()
seq_len = 2048
TRAINING_STAGES = [
    TrainingStage(duration=1/3, batch_size=8 * args.seq_len * 8, lr_mul=1.0),
    TrainingStage(duration=1/3, batch_size=16 * 2048 * 8, lr_mul=unknown()),
    TrainingStage(duration=1/3, batch_size=24 * 2048 * 8),
    TrainingStage(batch_size=24 * 2048 * 8),
]
"""


@pytest.mark.parametrize("source", [SCHEDULE, STAGES])
def test_tokens_of_a_batch_that_grows_are_those_published(source, tmp_path):
    (tmp_path / "log.txt").write_text(foreign(source, steps=2090))
    log = ledger_logs.read_log(tmp_path / "log.txt")
    assert log.tokens_until(2090) == 552_992_768
    assert log.tokens_until(684) == 684 * 131_072  # the second stage begins at step 684
    assert log.tokens_until(685) - log.tokens_until(684) == 262_144
    assert log.tokens_per_step == 552_992_768 / 2090


def test_nothing_of_a_source_is_run(tmp_path):
    trap = tmp_path / "trap"
    call = f"__import__('pathlib').Path({str(trap)!r}).touch() or 2048"
    source = f"import torch\nbatch_size = {call}\n"
    (tmp_path / "log.txt").write_text(foreign(source))
    assert ledger_logs.read_log(tmp_path / "log.txt").tokens_per_step is None
    assert not trap.exists()


# -----------------------------------------------------------------------------
# Folders
# -----------------------------------------------------------------------------

def lineage_of_others(root: Path) -> Path:
    """Three folders: the second pools a baseline's, a 1-GPU and an 8-GPU run, and has a script."""
    old, new = SOURCE, SOURCE.replace("8*64", "4*64")
    files = {
        "2024-10-14_ModernArch/a.txt": foreign(old, loss=3.2791, ms=900_000),
        "2025-01-04-SoftCap/b.txt": foreign(old, loss=3.2811, ms=905_000),
        "2025-01-04-SoftCap/one/c.txt": foreign(new, gpus=1, loss=3.2780, ms=594_000),
        "2025-01-04-SoftCap/d.txt": foreign(new, loss=3.2770, ms=78_000),
        "2025-01-04-SoftCap/e.txt": foreign(new, loss=3.2772, ms=78_200),
        "2025-01-04-SoftCap/analyze.py": "import json\nprint(json)\n",
        "2025-02-01_Named/baseline/f.txt": foreign(new + "# again\n", loss=3.3),
        "2025-02-01_Named/baseline/g.txt": foreign(new + "# again\n", loss=3.3),
        "2025-02-01_Named/ours/h.txt": foreign(new + "x = 1\n", loss=3.2),
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "2025-03-01_Empty").mkdir()
    return root


def test_list_pools_only_runs_of_one_source_and_machine(tmp_path, capsys):
    root = lineage_of_others(tmp_path)
    assert ledger.main(["list", str(root), "--json"]) == 0
    out, err = capsys.readouterr()
    assert "read 8 logs in 8 files of 4 folder(s)" in err
    rows = json.loads(out)
    assert [(row["date"], row["name"], row["runs"], row["n"], row["ranks"]) for row in rows] == [
        ("2024-10-14", "ModernArch", "record", 1, 8),
        ("2025-01-04", "SoftCap", "record", 2, 8),
        ("2025-01-04", "SoftCap", "1 rank(s) instead of 8", 1, 1),
        ("2025-01-04", "SoftCap", "baseline: source of 2024-10-14_ModernArch", 1, 8),
        ("2025-02-01", "Named", "record", 1, 8),
        ("2025-02-01", "Named", "called a baseline", 2, 8),
    ]  # fmt: skip
    second = rows[1]
    assert (second["val_loss_mean"], second["train_time_ms_median"]) == (3.2771, 78_100)
    assert second["p_target"] == pytest.approx(
        stats.ttest_1samp([3.2770, 3.2772], 3.28, alternative="less").pvalue, rel=1e-2)
    assert (second["lines_added"], second["lines_removed"]) == (1, 1)
    assert (second["steps"], second["tokens_per_step"]) == (20, 4 * 64 * 1024)
    assert rows[0]["p_target"] is None and rows[2]["lines_added"] is None


def test_list_of_one_folder_of_others_prints_its_rows(tmp_path, capsys):
    root = lineage_of_others(tmp_path)
    assert ledger.main(["list", str(root / "2025-01-04-SoftCap")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and all("SoftCap" in line for line in lines[2:])
    assert "baseline: source of 2024-10-14_ModernArch" in lines[-1]
    assert "p (mean < 3.28)" in lines[0] and "Pocket" not in lines[0]


def test_diff_takes_the_records_source_from_a_folder_of_others(tmp_path, capsys):
    root = lineage_of_others(tmp_path)
    folders = [str(root / "2024-10-14_ModernArch"), str(root / "2025-01-04-SoftCap")]
    assert ledger.main(["diff", *folders, "--json"]) == 0
    out, err = capsys.readouterr()
    (field,) = json.loads(out)["hyperparameters"]
    assert field == {"name": "batch_size", "a": "8 * 64", "b": "4 * 64"}
    assert "1 log(s) are left out, baseline" in err


def test_a_script_stands_for_a_folder_whose_logs_have_no_source(tmp_path):
    (tmp_path / "log.txt").write_text(FORMATS["A"][1])
    (tmp_path / "train_gpt2.py").write_text(SOURCE)
    assert ledger_groups.source_of(tmp_path) == SOURCE


# -----------------------------------------------------------------------------
# Curves
# -----------------------------------------------------------------------------

def is_drawn(png: Path) -> bool:
    import matplotlib.image

    pixels = matplotlib.image.imread(png)
    return pixels.shape[1] > 1500 and pixels[..., :3].std() > 0.02


def test_curves_of_logs_without_times_are_drawn_where_they_can(tmp_path, capsys):
    for letter in "AF":
        (tmp_path / f"{letter}.txt").write_text(FORMATS[letter][1])
    png = tmp_path / "out.png"
    operands = [str(tmp_path / f"{letter}.txt") for letter in "AF"]
    assert ledger.main(["curves", *operands, "--png", str(png)]) == 0
    out, err = capsys.readouterr()
    assert "A has no training time" in err and "A has no training tokens" in err
    assert "3.28 (target)" in out and is_drawn(png)
    assert ledger.main(["curves", operands[0], "--png", str(png)]) == 0
    import matplotlib.image

    assert "no training" not in capsys.readouterr().err  # there is no such panel
    assert matplotlib.image.imread(png).shape[1] < 1000


def test_curves_are_named_by_their_record_and_steps_are_whole(tmp_path, capsys):
    folder = lineage_of_others(tmp_path) / "2025-01-04-SoftCap"
    text = foreign(SOURCE.replace("8*64", "4*64"), loss=3.2)
    earlier = "step:19/20 val_loss:3.1000 train_time:1ms step_avg:1.00ms\nstep:20/20"
    (folder / "e.txt").write_text(text.replace("step:20/20", earlier))
    operands = [folder, folder / "e.txt", tmp_path / "2024-10-14_ModernArch" / "a.txt"]
    assert ledger.main(["curves", *map(str, operands), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in rows} == {str(folder), "SoftCap e", "ModernArch"}
    row = next(row for row in rows if row["reached"] == 2 and row["loss"] == 3.28)
    assert row["step"] == 19  # of 19 and 20, not 19.5


def test_training_losses_are_drawn_of_a_run_that_validates_once(tmp_path):
    lines = [f"step:{k}/100 train_loss:{1 + 1 / k:.4f} train_time:{k}ms step_avg:1.00ms\n"
             for k in range(1, 101)]  # fmt: skip
    end = "step:100/100 val_loss:1.1000 train_time:100ms step_avg:1.00ms\n"
    (tmp_path / "once.txt").write_text("".join(lines) + end)
    log = ledger_logs.read_log(tmp_path / "once.txt")
    assert log.val == {100: (1.1, 100)} and log.train[50] == (1.02, 50)
    curve = ledger_pictures.Curve.of("once", [log])
    assert curve.training and curve.steps == [*range(2, 101, 2), 100]  # 50 pieces, then the end
    assert curve.mean[0] == pytest.approx((2 + 1.5) / 2) and curve.mean[-1] == 1.1
    assert curve.times[:2] == [2, 4] and curve.tokens is None


def test_curves_leave_out_what_is_not_finite(tmp_path, capsys):
    (tmp_path / "bad.txt").write_text(TIMED.replace("3.2808", "nan"))
    (tmp_path / "prose.txt").write_text("nothing\n")
    png = tmp_path / "out.png"
    assert ledger.main(["curves", str(tmp_path), "--png", str(png), "--json"]) == 0
    out, err = capsys.readouterr()
    assert "1 of 2 files are not used" in err and png.exists()
    rows = json.loads(out)
    assert rows[-1] == {"loss": 3.28, "name": tmp_path.name, "step": None, "time_ms": None,
                        "reached": 0, "n": 1}  # fmt: skip


# -----------------------------------------------------------------------------
# Bad input
# -----------------------------------------------------------------------------

@pytest.mark.parametrize(
    "command, words",
    [
        (["diff", "nowhere", "here"], "nowhere"),
        (["curves", "nowhere"], "No such file"),
        (["curves", "empty.txt"], "empty.txt is empty"),
        (["curves", "blank.txt"], "blank.txt is empty"),
        (["curves", "binary.bin"], "binary.bin: byte 1 is not text"),
        (["curves", "zero.bin"], "zero.bin: byte 3 is not text"),
        (["curves", "prose.txt"], "prose.txt has no training steps"),
        (["curves", "cut.txt"], "cut inside its source"),
        (["curves", "folder"], "no log with validation losses"),
        (["curves", "steps.txt"], "no validation"),
        (["curves", "log.txt", "--png", "no/such/out.png"], "no/such/out.png: No such file"),
        (["curves", "log.txt", "--png", "folder"], "folder: Is a directory"),
        (["diff", "a.py", "a.py", "--html", "no/such.html"], "no/such.html: No such file"),
        (["run", "a.py", "--out", "a.py/out"], "a.py/out: Not a directory"),
        (["curves", "unlike", "--png", "out.png"], "share no step"),
        (["extract", "console.txt"], "no source in it"),
        (["extract", "log.txt", "--file", "x.py"], "--file x.py: the log has train_gpt.py"),
        (["diff", "console.txt", "console.txt"], "no source in it"),
        (["diff", "folder", "folder"], "no log with validation losses"),
        (["list", "nowhere"], "nowhere: no such folder"),
        (["verify", "nowhere"], "nowhere: no such folder"),
        (["verify", "spoiled"], "is no record.json"),
        (["lineage", "folder"], "no records to draw"),
        (["run", "folder"], "folder: no script there"),
        (["run", "a.py:muon_lr"], "'muon_lr' is no flag"),
        (["run", "b.py:muon_lr=1"], "b.py:muon_lr=1: no script there"),
        (["verify", "--replay", "0"], "--replay: 0 is not a whole number"),
        (["run", "a.py", "--jobs", "0"], "--jobs: 0 is not a whole number"),
        (["run", "a.py", "--seeds", "0"], "--seeds: 0 is not a whole number"),
        (["curves"], "required: A"),
        (["frobnicate"], "frobnicate"),
    ],
)
def test_bad_input_is_answered_in_one_line(command, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    files = {
        "empty.txt": b"", "blank.txt": b"\n \n", "binary.bin": b"a\xff\xfe", "zero.bin": b"abc\0d",
        "prose.txt": b"It was a dark night.\n", "cut.txt": SOURCE[:60].encode(),
        "log.txt": FORMATS["G"][1].encode(), "console.txt": TIMED.encode(), "a.py": b"import os\n",
        "steps.txt": b"step:1/2 train_time:1ms step_avg:1.00ms\n",
    }  # fmt: skip
    for name, content in files.items():
        Path(name).write_bytes(content)
    Path("folder").mkdir()
    Path("unlike").mkdir()
    for step in (1, 2):
        Path(f"unlike/{step}.txt").write_text(f"s:{step} tel:3.0\n")
    Path("spoiled/2026-01-01_X").mkdir(parents=True)
    Path("spoiled/2026-01-01_X/record.json").write_text('{"claim": ')
    try:
        status = ledger.main(command)
    except SystemExit as error:
        status = error.code
    err = capsys.readouterr().err
    assert status == 2 and words in err and err.count("\n") == 1, err
