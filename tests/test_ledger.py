"""The ledger reads every log format, and finds each claim that a log does not bear.

The records here are made by the tests: a small script that writes the log of a run, without
training anything, is measured by `ledger.py run` in a folder of its own.
"""

import hashlib
import html.parser
import json
import math
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats
from test_ledger_public import is_drawn

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "records"))

import ledger  # noqa: E402
import ledger_logs  # noqa: E402
import ledger_records  # noqa: E402
import ledger_runs  # noqa: E402
import ledger_sources  # noqa: E402
import ledger_stats  # noqa: E402
import ledger_tables  # noqa: E402
import ledger_verify  # noqa: E402

RULE = "=" * 100


def banner(title: str, shared: bool = False) -> str:
    return f"# ---- {title}{' (the same in every record)' * shared} " + "-" * 20


# Writes what train_gpt.py writes; `loss` and `ms` of the last step vary with the seed. Half of the
# noise is the seed's own, as if it came from the order of the data, and half the script's.
SCRIPT = f"""\"\"\"A run's log without a run.

Parent: none. It is the first.
\"\"\"

{banner("Setup")}
import os
import random
import string
import sys
from pathlib import Path

WIDTH = 100

{banner("Hyperparameters")}
class Hyperparameters:
    num_iterations: int = 4 * 10
    loss: float = 1.6
    target_loss: float = 3.28
    val_files: str = "data/fineweb10B/fineweb_val_*.bin"
    val_tokens: int = 10_485_760
    seed: int = 0
    run_id: str = ""
    muon_lr: float = 0.05

PRESETS = {{"record": {{}}, "pocket": dict(
    target_loss=1.64, val_files="data/pocket/pocket_val_*.bin", val_tokens=262_144)}}

{banner("Data", True)}
def tokens():
    return string.digits

{banner("Model")}
def noise_of(seed, cfg):
    return random.Random(seed).gauss(0, 0.004) + random.Random(f"{{seed}}{{cfg}}").gauss(0, 0.002)

{banner("Distributed and logging", True)}
def say(lines):
    return "\\n".join(lines) + "\\n"

{banner("Checkpoints", True)}
def save():
    return None

{banner("Validation", True)}
def validate(loss):
    return loss

{banner("Training")}
def train(preset, flags):
    cfg = {{k: v for k, v in vars(Hyperparameters).items() if k[0] != "_"}} | PRESETS[preset]
    cfg |= {{k: type(cfg.get(k, ""))(v) for k, v in flags.items()}}
    seed, noise = cfg["seed"], random.Random(f"{{cfg['seed']}} {{cfg['loss']}}")
    if cfg.get("fail") == "1" and seed == 1:
        sys.exit("fake.py: error: out of luck")
    folder = Path("logs") / cfg["run_id"]
    folder.mkdir(parents=True)
    machine = dict(torch="2.13.0+cpu", device="cpu (fake)", world_size=1,
                   threads=os.environ.get("OMP_NUM_THREADS", "2"))
    rule = "=" * WIDTH
    facts = dict(preset=preset) | cfg | dict(python="3.11") | machine
    lines = [Path(__file__).read_text(), rule, *(f"{{k}}: {{v}}" for k, v in facts.items()), rule]
    lines += ["fake: yes", "compile_seconds: 1.5"]
    value, steps = validate(cfg["loss"]) + noise_of(seed, cfg["loss"]), cfg["num_iterations"]
    for step in range(steps + 1):
        ms = step * (30 + noise.random())
        loss = value + 4 * 0.8**step
        average = f"train_time:{{ms:.0f}}ms step_avg:{{ms / max(step, 1):.2f}}ms"
        if step:
            lines.append(f"step:{{step}}/{{steps}} train_loss:{{loss:.4f}} {{average}}")
        if step % 10 == 0:
            lines.append(f"step:{{step}}/{{steps}} val_loss:{{loss:.4f}} {{average}}")
            print(lines[-1], flush=True)
    lines += ["---", f"val_loss: {{loss:.6f}}", f"train_time_ms: {{ms:.0f}}", f"steps: {{steps}}",
              "tokens: 163840", "tokens_per_second: 1000", "parameters: 1234", "flop: 1000000",
              "peak_memory_mib: 99", f"seed: {{seed}}"]
    lines += [f"{{k}}: {{v}}" for k, v in machine.items() if k != "threads"]
    (folder / "log.txt").write_text(say(lines))


if __name__ == "__main__":
    words = dict(zip((word[2:] for word in sys.argv[1::2]), sys.argv[2::2]))
    train(words.pop("preset"), words)
"""
PARENT, NEWEST = "2026-01-01_First", "2026-02-02_Second"
CHILD = SCRIPT.replace("loss: float = 1.6\n", "loss: float = 1.5\n").replace(
    "Parent: none. It is the first.", f"Parent: {PARENT}. Change: less loss."
)
REGION = "\n\n".join(ledger_tables.REGION)
RULES_REGION = "\n\n".join(ledger_tables.RULES_REGION)
SEEDS = 10  # what the rules want of the newest record


def make_records(root: Path) -> Path:
    """Two claimed records, not measured, and the root's script, under `root`."""
    claims = {
        PARENT: {"number": 1, "change": "the first | one", "parent": None, "meets_target": True,
                 "gain": None,
                 "published": {"number": 5, "minutes": 15.2, "val_loss": 3.2741,
                               "hardware": "8×H100", "source": "https://example.org/log"}},
        NEWEST: {"number": 2, "change": "less loss", "parent": PARENT, "meets_target": True,
                 "gain": "loss", "published": None},
    }  # fmt: skip
    for name, claim in claims.items():
        folder = root / "records" / name
        folder.mkdir(parents=True)
        (folder / "train_gpt.py").write_text(SCRIPT if name == PARENT else CHILD)
        (folder / "record.json").write_text(json.dumps({"claim": claim}))
        (folder / "README.md").write_text(f"# {name}\n\n{REGION}\n\nEnd.\n")
    (root / "records" / "README.md").write_text(f"# Records\n\n{REGION}\n\n{RULES_REGION}\n")
    (root / "train_gpt.py").write_text(CHILD)
    return root / "records"


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The two records, measured in turns over all seeds, with their tables written."""
    root = tmp_path_factory.mktemp("measured")
    records = make_records(root)
    operands = [str(records / PARENT), str(records / NEWEST)]
    flags = ["--seeds", str(SEEDS), "--out", str(root / "out")]
    assert ledger.main(["run", *operands, *flags]) == 0
    assert ledger.main(["list", str(records), "--write"]) == 0
    return root


@pytest.fixture
def records(measured, tmp_path):
    """A copy of the measured records, to be spoilt."""
    shutil.copytree(measured, tmp_path / "copy", symlinks=True)
    return tmp_path / "copy" / "records"


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def findings(folder: Path, capsys) -> list[str]:
    """What verify prints, after its exit status is checked against it."""
    capsys.readouterr()
    status = ledger.main(["verify", str(folder)])
    found = capsys.readouterr().out.splitlines()
    assert status == (0 if "verified" in found[0] else 1)
    return [] if status == 0 else found


# -----------------------------------------------------------------------------
# Logs
# -----------------------------------------------------------------------------


def test_a_log_of_the_script_is_read_back_exactly(run_script, tiny_shards, tmp_path, final_values):
    train = tiny_shards([9000])
    val = tiny_shards([2049], name="tiny_val", seed=1)
    flags = {"preset": "pocket", "train_files": train, "val_files": val, "num_iterations": 3,
             "val_every": 2, "val_tokens": 2048, "val_seq_len": 512, "train_seq_len": 128,
             "sequences_per_step": 4, "run_id": "r", "seed": 7}  # fmt: skip
    done = run_script([word for k, v in flags.items() for word in (f"--{k}", v)])
    assert done.returncode == 0, done.stderr
    log = ledger_logs.read_log(tmp_path / "logs" / "r" / "log.txt")
    assert log.source.encode() == (REPO / "train_gpt.py").read_bytes()
    assert log.header.items() >= {k: str(v) for k, v in flags.items()}.items()
    assert log.final == final_values(log.path.read_text())
    shown = re.findall(r"^step:(\d+)/3 val_loss:(\S+) train_time:(\d+)ms", done.stdout, re.M)
    assert log.val == {int(step): (float(loss), float(ms)) for step, loss, ms in shown}
    assert sorted(log.val) == [0, 2, 3] and sorted(log.train) == [1, 2, 3]
    assert log.finished and not log.notes
    assert log.tokens_per_step == int(log.final["tokens"]) / 3
    del log.final["tokens"]
    assert log.tokens_per_step == 4 * 128  # from its header, as for a run that was stopped


def test_a_resumed_run_counts_the_last_line_of_a_step(measured, tmp_path):
    text = (measured / "out/logs" / f"{PARENT}-seed-0" / "log.txt").read_text()
    head, _, final = text.rpartition("---\n")
    path = tmp_path / "log.txt"
    path.write_text(
        head.partition("step:31/40")[0]
        + "stopped at step:30 by signal 15\n"
        + "resumed at step:20 from step-000020.pt; steps 21 to 30 are redone\n"
        + "step:30/40 val_loss:1.5555 train_time:77ms step_avg:2.57ms redone:1\n"
        + "step:40/40 val_loss:1.5000 train_time:99ms step_avg:2.57ms\n---\n"
        + final
    )
    log = ledger_logs.read_log(path)
    assert log.val[30] == (1.5555, 77) and log.val[20][0] != 1.5555
    assert log.finished and [note[:7] for note in log.notes] == ["resumed"]


def test_a_finished_run_that_was_resumed_is_read_and_not_used_again(measured, tmp_path):
    out, name = tmp_path / "out", f"{PARENT}-seed-0"
    shutil.copytree(measured / "out/logs" / name, out / "logs" / name)
    path = out / "logs" / name / "log.txt"
    contestant = ledger_runs.Contestant.of(str(measured / "records" / PARENT))
    assert contestant.next_log(out, 0) == (path, True)
    final = path.read_text().rpartition("---\n")[2]
    path.write_text(
        path.read_text()
        + "resumed at step:40 from step-000040.pt\n"
        + "step:40/40 val_loss:1.7000 train_time:1200ms step_avg:30.00ms redone:1\n---\n"
        + re.sub(r"val_loss: \S+", "val_loss: 1.700049\nmfu: 0.4", final)
    )
    log = ledger_logs.read_log(path)
    assert log.finished and log.resumed and log.final["mfu"] == "0.4"
    assert (log.val_loss, log.val[40]) == (1.700049, (1.7, 1200))
    again, reused = contestant.next_log(out, 0)
    assert again.parent.name == f"{name}-2" and not reused


@pytest.mark.parametrize(
    "ending, note",
    [
        ("stopped at step:30 by signal 15\n", "stopped at step:30"),
        ("step:31/40 train_ti", "cut in the middle of a line"),
        ("error: step 31: non-finite loss on rank 0\n", "failed: step 31: non-finite loss"),
        ("step:x/40 val_loss:1.0 train_time:1ms step_avg:1ms\nstep:31/40 val_loss:3.x\n", "cannot"),
        ("", "stopped at step 30 of 40"),
    ],
)
def test_what_could_be_read_of_an_unfinished_log_is_used(ending, note, measured, tmp_path, capsys):
    text = (measured / "out/logs" / f"{PARENT}-seed-0" / "log.txt").read_text()
    path = tmp_path / "log.txt"
    path.write_text(text.partition("step:31/40")[0] + ending)
    log = ledger_logs.read_log(path)
    assert not log.finished and any(note in found for found in log.notes)
    assert sorted(log.val) == [0, 10, 20, 30]
    assert ledger.main(["curves", str(path)]) == 0
    assert note in capsys.readouterr().err


# -----------------------------------------------------------------------------
# Statistics
# -----------------------------------------------------------------------------


def sample(mean, std, n):
    """n numbers with exactly this mean and standard deviation, up to rounding."""
    raw = [math.sin(i) for i in range(n)]
    center, spread = statistics.fmean(raw), statistics.stdev(raw)
    return [mean + std * (value - center) / spread for value in raw]


def test_p_value_of_the_published_record_21():
    # Published: n=81, mean 3.2787, std 0.0019, p=0.00000002. The exact p depends on digits that
    # the mean and std do not show: the published one lies between those of the roundings.
    low = ledger_stats.p_below(sample(3.27865, 0.00185, 81), 3.28)
    high = ledger_stats.p_below(sample(3.27875, 0.00195, 81), 3.28)
    assert low < 2e-8 < high
    p = ledger_stats.p_below(sample(3.2787, 0.0019, 81), 3.28)
    assert f"{p:.0e}" in ("1e-08", "2e-08")
    t, df = (3.28 - 3.2787) / (0.0019 / 9), 80  # Student's distribution by its definition
    assert p == pytest.approx(special.betainc(df / 2, 0.5, df / (df + t * t)) / 2, rel=1e-2)


def test_welch_against_its_definition():
    a, b = sample(3.28, 0.002, 10), sample(3.279, 0.004, 7)
    va, vb = 0.002**2 / 10, 0.004**2 / 7
    t, df = 0.001 / math.sqrt(va + vb), (va + vb) ** 2 / (va**2 / 9 + vb**2 / 6)
    expected = special.betainc(df / 2, 0.5, df / (df + t * t))
    assert ledger_stats.p_welch(a, b) == pytest.approx(expected, rel=1e-2)


def seeded(values):
    return dict(enumerate(values))


def test_pairs_are_used_where_seeds_rise_and_fall_together():
    common, own = sample(0, 0.01, 8), sample(0, 0.002, 9)[1:]
    a, b = [3.2 + x for x in common], [3.21 + x + y for x, y in zip(common, own)]
    found = ledger_stats.compare_losses(seeded(a), seeded(b))
    assert found["test"] == "paired t-test"
    assert found["p_differs"] == pytest.approx(stats.ttest_rel(a, b).pvalue, rel=1e-2)
    assert found["correlation"] == pytest.approx(statistics.correlation(a, b), rel=1e-2)
    unrelated = [3.21 + x for x in sample(0, 0.01, 8)[::-1]]
    found = ledger_stats.compare_losses(seeded(a), seeded(unrelated))
    assert found["test"] == "Welch's t-test" and found["correlation"] < 0.5
    p = stats.ttest_ind(a, unrelated, equal_var=False).pvalue
    assert found["p_differs"] == pytest.approx(p, rel=1e-2)
    fewer = ledger_stats.compare_losses(seeded(a), seeded(b[:-1]))
    assert fewer["test"] == "Welch's t-test" and fewer["correlation"] is None


def test_equal_losses_are_no_difference():
    found = ledger_stats.compare_losses(seeded([3.2, 3.3]), seeded([3.2, 3.3]))
    assert (found["difference"], found["p_differs"]) == (0, 1.0)
    assert not ledger_stats.is_shown(found)
    a = sample(3.28, 0.01, 10)  # equal mathematics, rounded otherwise at every seed alike
    b = [x + 1e-6 + 1e-8 * i for i, x in enumerate(a)]
    found = ledger_stats.compare_losses(seeded(a), seeded(b))
    assert found["p_differs"] < 0.01 and not ledger_stats.is_shown(found)


@pytest.mark.parametrize("paired", [True, False])
def test_the_smallest_difference_is_the_one_that_is_just_significant(paired):
    common, own = sample(0, 0.01 if paired else 0.0, 8), sample(0, 0.003, 9)[1:]
    a = [3.2 + x - y for x, y in zip(common, own[::-1])]
    b = [3.2 + x + y for x, y in zip(common, own)]
    found = ledger_stats.compare_losses(seeded(a), seeded(b))
    shift = found["smallest_shown"] - (statistics.fmean(b) - statistics.fmean(a))
    moved = [x + shift for x in b]
    test = stats.ttest_rel(moved, a) if paired else stats.ttest_ind(moved, a, equal_var=False)
    assert found["test"] == ("paired t-test" if paired else "Welch's t-test")
    assert test.pvalue == pytest.approx(0.01, rel=0.05)  # the difference has three digits


def test_no_p_value_where_there_is_none():
    assert ledger_stats.p_below([3.0], 3.28) is None
    assert ledger_stats.p_below([3.0, 3.0], 3.28) is None
    assert ledger_stats.p_welch([3.0, 3.1], [3.0]) is None


# -----------------------------------------------------------------------------
# Diff
# -----------------------------------------------------------------------------


def test_diff_goes_by_section_and_sums_up(tmp_path, capsys):
    new = (
        SCRIPT.replace("import random\n", "")
        .replace("num_iterations: int = 4 * 10", "num_iterations: int = 50\n    extra: int = 1")
        .replace("def train(preset", "def helper():\n    return 1\n\n\ndef train(presets")
    )
    a, b = tmp_path / "a.py", tmp_path / "b.py"
    a.write_text(SCRIPT)
    b.write_text(new)
    assert ledger.main(["diff", str(a), str(b), "--json"]) == 0
    diff = json.loads(capsys.readouterr().out)
    assert diff["hyperparameters"] == [
        {"name": "num_iterations", "a": "4 * 10", "b": "50"},
        {"name": "extra", "a": None, "b": "1"},
    ]
    assert diff["definitions"] == {"changed": ["train"], "added": ["helper"], "removed": []}
    counts = {s["title"]: (s["added"], s["removed"]) for s in diff["sections"]}
    assert counts == {"Setup": (0, 1), "Hyperparameters": (2, 1), "Training": (5, 1)}
    git = subprocess.run(["git", "diff", "--no-index", "--numstat", a, b], stdout=subprocess.PIPE)
    assert git.stdout.split()[:2] == [b"%d" % diff["added"], b"%d" % diff["removed"]]
    hunk = next(s for s in diff["sections"] if s["title"] == "Setup")["lines"]
    first = SCRIPT.split("\n").index("import random") + 1
    assert hunk[0].startswith(f"@@ -{first - 2},") and "-import random" in hunk
    assert ledger.main(["diff", str(a), str(b), "--stat"]) == 0
    assert "-import random" not in capsys.readouterr().out
    assert ledger.main(["diff", str(a), str(b)]) == 0
    out = capsys.readouterr().out
    assert "-import random" in out and "num_iterations: 4 * 10 → 50" in out


def test_banners_of_one_line_name_the_same_sections_as_banners_of_three():
    rule = "# " + "-" * 77
    three = re.sub(r"# ---- ([A-Z][a-z ]+?)(?: \(.*\))? -+", rf"{rule}\n# \1\n{rule}", SCRIPT)
    titles = [list(ledger_sources.banners(text.split("\n")).values()) for text in (SCRIPT, three)]
    assert titles[0] == titles[1] and set(ledger_sources.SHARED) < set(titles[0])
    changed = three.replace("num_iterations: int = 4", "num_iterations: int = 5")
    diff = ledger_sources.diff_sources(SCRIPT, changed.replace("import random", "import re"))
    assert {"Setup", "Hyperparameters"} <= {section["title"] for section in diff["sections"]}
    assert ledger_sources.banners(["# -- not a section", "x = 1  # ---- nor this ----"]) == {}


def test_diff_of_sources_without_sections_goes_by_definition():
    old = '"""Doc."""\nimport os\n\n# about f\ndef f():\n    return 1\n\nclass G:\n'
    old += "    def m(self):\n        return 2\n    def n(self):\n        return 3\n"
    new = old.replace("return 3", "return 4").replace("# about f", "# of f").replace("Doc", "Dog")
    diff = ledger_sources.diff_sources(old, new)
    assert [section["title"] for section in diff["sections"]] == ["Docstring", "f", "G"]
    assert diff["definitions"]["changed"] == ["G.n"]  # a comment is no change of a function
    both = ledger_sources.diff_sources(old, SCRIPT)  # one side has banners: by definition too
    assert {"f", "G", "train"} <= {section["title"] for section in both["sections"]}


def test_presets_are_told_field_by_field():
    old = 'PRESETS = {"record": {}, "pocket": dict(lr=1, n=2)}\n'
    diff = ledger_sources.diff_sources(old, old.replace("n=2", "n=3"))
    assert diff["hyperparameters"] == [{"name": "pocket.n", "a": "2", "b": "3"}]
    assert not any(diff["definitions"].values())


LINES = st.lists(st.sampled_from(["x = 1", "y = 2", "", "# c", "def f(): pass", "def g(): pass"]))


@given(LINES, LINES)
def test_a_diff_turns_one_source_into_the_other(a, b):
    a, b = ("".join(f"{line}\n" for line in lines) for lines in (a, b))
    diff = ledger_sources.diff_sources(a, b)
    assert diff["added"] - diff["removed"] == b.count("\n") - a.count("\n")
    assert bool(diff["sections"]) == (sorted(diff_key(a)) != sorted(diff_key(b)))


def diff_key(source):
    return [(title, [line for _, line in lines])
            for title, lines in ledger_sources.sections(source, False).items()]  # fmt: skip


def test_the_html_page_needs_nothing_else(tmp_path):
    page = tmp_path / "diff.html"
    a, b = tmp_path / "a.py", tmp_path / "b.py"
    a.write_text(SCRIPT)
    b.write_text(SCRIPT.replace("step % 10 == 0", "step < 10 <b>"))
    assert ledger.main(["diff", str(a), str(b), "--html", str(page)]) == 0

    tags, texts = [], []

    class Reader(html.parser.HTMLParser):
        def handle_starttag(self, tag, attributes):
            tags.append((tag, dict(attributes)))

        def handle_data(self, data):
            texts.append(data)

    Reader().feed(page.read_text())
    assert any(text.startswith("+") and "step < 10 <b>:" in text for text in texts)
    assert not any({"src", "href"} & set(attributes) for _, attributes in tags)
    assert "http" not in page.read_text() and "details" in dict(tags)


def test_list_and_diff_need_the_standard_library_only(measured):
    folder = measured / "records"
    block = "import sys; sys.modules.update(dict.fromkeys(['numpy', 'scipy', 'matplotlib'])); "
    for verb in (["list", folder], ["diff", folder / PARENT, folder / NEWEST]):
        code = f"{block}sys.path.insert(0, {str(REPO / 'records')!r}); import ledger; "
        code += f"sys.exit(ledger.main({list(map(str, verb))!r}))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0 and NEWEST.partition("_")[2] in done.stdout, done.stderr


# -----------------------------------------------------------------------------
# Runs and records
# -----------------------------------------------------------------------------


def test_runs_go_in_turns_and_record_what_the_logs_say(measured):
    out = measured / "out" / "logs"
    order = sorted(out.iterdir(), key=lambda folder: folder.stat().st_mtime_ns)
    names = [f"{name}-seed-{seed}" for seed in range(SEEDS) for name in (PARENT, NEWEST)]
    assert [folder.name for folder in order] == names

    def values(name, key):
        texts = [(out / f"{name}-seed-{seed}" / "log.txt").read_text() for seed in range(SEEDS)]
        return [float(re.search(rf"^{key}: (\S+)$", text, re.M)[1]) for text in texts]

    content = json.loads((measured / "records" / NEWEST / "record.json").read_text())
    m = content["measured"]
    losses, times = values(NEWEST, "val_loss"), values(NEWEST, "train_time_ms")
    assert [run["val_loss"] for run in m["runs"]] == losses
    assert [run["train_time_ms"] for run in m["runs"]] == times
    mean, variance = sum(losses) / SEEDS, sum((x - sum(losses) / SEEDS) ** 2 for x in losses) / 9
    assert m["val_loss_mean"] == round(mean, 6) and m["n"] == SEEDS
    assert m["val_loss_std"] == round(math.sqrt(variance), 6)
    assert m["p_target"] == ledger_stats.p_below(losses, 1.64)
    assert (m["steps"], m["tokens"], m["parameters"]) == (40, 163840, 1234)
    assert m["peak_memory_mib"] == 99
    assert (m["torch"], m["device"], m["threads"]) == ("2.13.0+cpu", "cpu (fake)", "1")
    # exp(-0.22 * 20) * 4 above 1.5 is the first validation below 1.64
    assert [run["target_step"] for run in m["runs"]] == [20] * SEEDS
    parent_losses, parent_times = values(PARENT, "val_loss"), values(PARENT, "train_time_ms")
    versus = m["parent"]
    assert versus["difference"] == round(mean - sum(parent_losses) / SEEDS, 6)
    assert versus["test"] == "paired t-test"  # the seeds' noise is the larger part
    assert versus["p_differs"] == pytest.approx(stats.ttest_rel(losses, parent_losses).pvalue, 1e-2)
    r = statistics.correlation(losses, parent_losses)
    assert versus["correlation"] == pytest.approx(r, 1e-2)
    ratios = [a / b for a, b in zip(times, parent_times)]
    ratios = [min(ratios), statistics.median(ratios), max(ratios)]
    shown = [versus[f"time_ratio_{kind}"] for kind in ("min", "median", "max")]
    assert shown == [round(ratio, 4) for ratio in ratios]
    assert m["lines"] == {"added": 2, "removed": 2}
    assert m["script_sha256"] == sha_of(CHILD)
    kept = measured / "records" / NEWEST / "logs"
    sizes = [(kept / f"seed-{seed}.txt").read_text().count(CHILD) for seed in range(SEEDS)]
    assert sizes == [1] + [0] * (SEEDS - 1)
    assert "def train" not in (kept / "parent-seed-0.txt").read_text()


def test_finished_runs_are_used_again(measured, tmp_path, capfd):
    shutil.copytree(measured / "out", tmp_path / "out", symlinks=True)
    script = tmp_path / f"{PARENT}.py"  # a plain script is compared, and writes no record
    script.write_text(SCRIPT)
    flags = ["run", str(script), "--seeds", str(SEEDS + 1), "--out", str(tmp_path / "out")]
    assert ledger.main([*flags, "--json"]) == 0
    out, err = capfd.readouterr()
    assert err.count("used as it was") == SEEDS and "seed 9: used as it was" in err
    assert re.search(r"1 run\(s\) to go, about 0:0\d min by the runs kept here", err)
    (result,) = json.loads(out)
    assert result["n"] == SEEDS + 1
    assert ledger.main([*flags, "--preset", "record"]) == 2
    assert "give another folder" in capfd.readouterr().err


def test_a_failing_run_is_named_and_the_rest_kept(tmp_path, capfd):
    records = make_records(tmp_path)
    out = tmp_path / "out"
    before = (records / PARENT / "record.json").read_text()
    flags = ["run", str(records / PARENT), "--seeds", "3", "--out", str(out)]
    assert ledger.main([*flags, "--script-args", "--fail", "1"]) == 1
    err = capfd.readouterr().err.splitlines()
    assert "[2/3]" in err[-1] and "seed 1: exit status 1" in err[-1] and "out of luck" in err[-1]
    assert (out / "logs" / f"{PARENT}-seed-0" / "log.txt").exists()
    assert (records / PARENT / "record.json").read_text() == before


def test_interrupted_runs_go_on_where_they_stopped(tmp_path):
    script = tmp_path / "slow.py"
    wait = "    if not Path('go').exists() and seed == 1:\n        __import__('time').sleep(60)\n"
    script.write_text(SCRIPT.replace("    folder = Path", wait + "    folder = Path"))
    command = [sys.executable, REPO / "records/ledger.py", "run", script, "--seeds", "2",
               "--out", tmp_path]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "logs/slow-seed-0/log.txt").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=30)[1]
    assert process.returncode == 1 and "Traceback" not in err, err
    assert "slow seed 1: stopped" in err and "--out" in err
    (tmp_path / "go").touch()
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "[2/2] slow seed 1: 1." in done.stderr, done.stderr


def test_a_script_is_tried_against_itself_with_flags(tmp_path, monkeypatch, capfd):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # from any folder, with a script from any other
    (tmp_path / "s.py").write_text(SCRIPT)
    out = tmp_path / "out"
    command = ["run", "../s.py", "../s.py:muon_lr=0.1,loss=1.9", "../s.py:muon_lr=0.1",
               "--seeds", "3", "--out", str(out)]  # fmt: skip
    assert ledger.main([*command, "--json"]) == 0
    first, second, third = json.loads(capfd.readouterr().out)
    assert [found["name"] for found in (first, second, third)] == ["s", "s-2", "s-3"]
    assert second["flags"] == {"muon_lr": "0.1", "loss": "1.9"}
    assert second["against"]["name"] == third["against"]["name"] == "s"
    assert second["against"]["difference"] == pytest.approx(0.3, abs=0.02)
    assert third["against"]["difference"] == 0
    header = ledger_logs.read_log(out / "logs" / "s-2-seed-1" / "log.txt").header
    assert (header["muon_lr"], header["loss"], header["seed"]) == ("0.1", "1.9", "1")
    assert (out / "data" / "pocket.py").exists()  # the repository's, which is not above the script
    assert ledger.main(command) == 0
    text, err = capfd.readouterr()
    assert err.count("used as it was") == 9
    least = f"{second['against']['smallest_shown']:.2g}"
    assert f"s-2 against s: {second['against']['test']}, correlation" in text
    assert f"these seeds would show a difference of {least}" in text
    assert ledger.main(["run", "../s.py", "../s.py:loss=1.8", "--out", str(out)]) == 2
    assert "has runs of s-2 with other flags" in capfd.readouterr().err


def test_two_jobs_run_at_once_on_one_thread_each_and_their_logs_tell(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    both = """
    import time
    deadline = time.monotonic() + 60
    while len(list(Path("logs").iterdir())) < 2:  # each waits for the other to begin
        assert time.monotonic() < deadline
        time.sleep(0.01)
"""
    script = tmp_path / "s.py"
    script.write_text(SCRIPT.replace("    machine = dict", f"{both}    machine = dict"))
    flags = ["run", str(script), "--seeds", "2", "--jobs", "2", "--out", str(tmp_path / "out")]
    assert ledger.main([*flags, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)[0]["n"] == 2
    for seed in range(2):
        path = tmp_path / "out" / "logs" / f"s-seed-{seed}" / "log.txt"
        log = ledger_logs.read_log(path)
        assert log.header["threads"] == "1" and log.final["jobs"] == "2"
    assert ledger.main(flags) == 0
    out = capfd.readouterr().out
    assert "times are those of 2 runs at once, on one thread each" in out
    losses = [ledger_logs.read_log(path).val_loss for path in tmp_path.rglob("log.txt")]
    error = statistics.stdev(losses)  # of a difference of two means of two: std · sqrt(2 / 2)
    least = stats.t.ppf(0.995, 2) * error
    assert f"a difference of {least:.4f} would be shown" in out


def test_a_record_is_not_written_by_a_try(records, tmp_path, capfd):
    before = (records / NEWEST / "record.json").read_text()
    operand, out = str(records / NEWEST), ["--out", str(tmp_path / "out")]
    assert ledger.main(["run", operand, "--seeds", "3", *out]) == 0
    words = "record.json is not written: 3 seeds, by the rules 10 are the least"
    assert words in capfd.readouterr().err
    assert ledger.main(["run", f"{operand}:loss=1.4", "--seeds", "1", *out[:1], operand]) == 0
    assert (records / NEWEST / "record.json").read_text() == before


def test_no_record_is_written_on_a_simulated_gpu(records):
    contestant = ledger_runs.Contestant.of(str(records / NEWEST))
    contestant.logs = dict(enumerate(ledger_logs.seed_files(records / NEWEST)))
    record = ledger_records.read_record(records / NEWEST)
    assert ledger_runs.unfit(contestant, record, "pocket", False) is None
    edit(contestant.logs[0], "device: cpu (fake)", "device: host standing in for an H100")
    assert "standing in" in ledger_runs.unfit(contestant, record, "pocket", False)
    assert "do not have --preset desk" in ledger_runs.unfit(contestant, record, "desk", False)


def test_a_script_that_changes_between_its_runs_is_found(tmp_path, capfd):
    script = tmp_path / "s.py"
    change = "    Path(__file__).write_text(Path(__file__).read_text() + '# changed')\n"
    script.write_text(SCRIPT.replace("    cfg = {", f"{change}    cfg = {{", 1))
    assert ledger.main(["run", str(script), "--seeds", "2", "--out", str(tmp_path / "out")]) == 1
    assert "its script was changed" in capfd.readouterr().err


def test_the_time_that_runs_take_is_told_before_they_begin(records, tmp_path):
    contestant = ledger_runs.Contestant.of(str(records / NEWEST))
    clock = ledger_runs.Clock(jobs=1)
    words = ledger_runs.forecast(clock, [contestant] * 60, "pocket")
    seconds = json.loads((records / NEWEST / "record.json").read_text())["measured"]["runs"][0]
    least = 60 * (seconds["train_time_ms"] / 1000 + 1.5)  # compile_seconds in the log
    assert f"60 run(s) to go, some {ledger_runs.clock_words(least)} by the records'" in words
    assert "the first tells how long" in ledger_runs.forecast(clock, [contestant], "lab")
    clock.add(contestant.name, 30.0)
    clock.add(contestant.name, 50.0)
    assert "about 0:40 min" in ledger_runs.forecast(clock, [contestant], "lab")
    clock.jobs = 2
    assert clock.left([contestant.name, "unknown", "unknown"]) == 60
    assert ledger_runs.clock_words(5025) == "1:23:45 h"


def test_list_tells_the_table(measured, capsys):
    capsys.readouterr()
    assert ledger.main(["list", str(measured / "records"), "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["number"], first["date"]) == (1, "2026-01-01")
    assert first["published"]["minutes"] == 15.2
    assert second["measured"]["lines"] == {"added": 2, "removed": 2}
    assert second["measured"]["parent"]["difference"] == pytest.approx(-0.1, abs=0.01)
    table = (measured / "records" / "README.md").read_text()
    assert f"[Second]({NEWEST})" in table and r"the first \| one" in table and "×1.000" in table
    assert "Measured on cpu (fake), 1 thread, torch 2.13.0+cpu." in table
    assert "| `pocket` | 1.64 | `data/pocket/pocket_val_*.bin` | 262,144 | 10 | 5 |" in table
    assert ledger.main(["list", str(measured / "records" / NEWEST)]) == 0
    out = capsys.readouterr().out
    assert "Second" in out and "First" not in out


# -----------------------------------------------------------------------------
# Runs made for their times
# -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_times(measured, tmp_path_factory):
    """The measured records with five runs each for the times, of a machine half as fast."""
    root = tmp_path_factory.mktemp("with_times") / "copy"
    shutil.copytree(measured, root, symlinks=True)
    forge(root / "records", ("step * (30 +", "step * (60 +"), logs=False)
    operands = [str(root / "records" / name) for name in (PARENT, NEWEST)]
    flags = ["--seeds", "5", "--times", "--out", str(root / "times")]
    assert ledger.main(["run", *operands, *flags]) == 0
    forge(root / "records", ("step * (60 +", "step * (30 +"))
    return root / "records"


@pytest.fixture
def timed(with_times, tmp_path):
    shutil.copytree(with_times.parent, tmp_path / "timed", symlinks=True)
    return tmp_path / "timed" / "records"


def test_times_are_kept_beside_the_losses(measured, timed, capsys):
    before, after = (json.loads((folder / NEWEST / "record.json").read_text())["measured"]
                     for folder in (measured / "records", timed))  # fmt: skip
    times = after.pop("times")
    assert before.pop("times") is None and before == after

    def values(name):
        texts = [(timed.parent / "times/logs" / f"{name}-seed-{seed}" / "log.txt").read_text()
                 for seed in range(5)]  # fmt: skip
        return [int(re.search(r"^train_time_ms: (\S+)$", text, re.M)[1]) for text in texts]

    ours, parents = values(NEWEST), values(PARENT)
    assert [run["train_time_ms"] for run in times["runs"]] == ours
    assert times["train_time_ms_median"] == statistics.median(ours) > 40 * 60
    ratios = [a / b for a, b in zip(ours, parents)]
    ratio = times["parent"]["time_ratio_median"]
    assert ratio == round(statistics.median(ratios), 4)
    shown = f"| {ledger_tables.duration(statistics.median(ours))} |"
    table, page = ((timed / name / "README.md").read_text() for name in ("", NEWEST))
    assert shown in table and f"×{ratio:.3f} |" in table
    assert "losses of 1 thread, times of one run alone on 1 thread, torch" in table
    assert f"Times, of one run alone on 1 thread, in turns with {PARENT}" in page
    assert ", run in turns (mean" not in page and page.count("in the median,") == 1
    assert findings(timed, capsys) == []
    capsys.readouterr()
    assert ledger.main(["list", str(timed), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)[1]["measured"]["times"]
    assert told["n"] == 5 and "runs" not in told and "runs" not in told["parent"]


def test_times_are_of_one_run_alone_and_stand_beside_losses(tmp_path, capfd):
    records = make_records(tmp_path)
    command = ["run", str(records / PARENT), "--seeds", "5", "--times", "--out", str(tmp_path)]
    assert ledger.main([*command, "--jobs", "2"]) == 2
    assert "--jobs 2: --times are of one run alone; leave --jobs out" in capfd.readouterr().err
    assert ledger.main(command) == 0
    assert "record.json is not written: its losses are not measured" in capfd.readouterr().err
    assert not (records / PARENT / "logs").exists()


SPOILED_TIMES = {
    "one of two at once": (
        "logs/times/seed-1.txt", "peak_memory_mib: 99", "jobs: 2\npeak_memory_mib: 99",
        "logs/times/seed-1.txt: is one of 2 runs at once"),
    "a time in a log": (
        "logs/times/seed-1.txt", "train_time_ms: 2", "train_time_ms: 1", "final train_time_ms"),
    "a time of the parent": (
        "logs/times/parent-seed-1.txt", "train_time_ms: 2", "train_time_ms: 3", "final train_time"),
    "another script": (
        "logs/times/seed-0.txt", "source sha256: ", "source sha256: 0", "the record's folder has"),
    "another parent": (
        "logs/times/parent-seed-0.txt", "sha256: ", "sha256: 0", "the parent's folder has"),
    "another preset": (
        "logs/times/seed-0.txt", "preset: pocket", "preset: record", "the losses with pocket"),
    "a claimed run without its log": (
        "record.json", '"times": {', '"times": {"speed": 3,', "measured.times.speed is 3"),
}  # fmt: skip


@pytest.mark.parametrize("what", SPOILED_TIMES)
def test_verify_finds_false_times(what, timed, capsys):
    file, old, new, words = SPOILED_TIMES[what]
    edit(timed / NEWEST / file, old, new)
    found = findings(timed, capsys)
    assert any(words in line for line in found), found


def test_times_need_five_seeds_from_0_on(timed, capsys):
    (timed / NEWEST / "logs/times/seed-1.txt").unlink()
    found = findings(timed, capsys)
    assert f"{NEWEST}: logs/times/seed-1.txt is claimed and missing" in found
    assert f"{NEWEST}: logs/times/seed-*.txt has 4 seeds, by the rules 5 are the least" in found


def test_a_gain_in_time_is_that_of_runs_alone(timed, capsys):
    edit(timed / NEWEST / "record.json", '"gain": "loss"', '"gain": "time"')
    found = f"{NEWEST}: it claims a gain in time over its parent, and its runs show none"
    assert findings(timed, capsys) == [found]
    for path in (timed / NEWEST / "logs/times").glob("parent-*.txt"):  # the parent is slower
        text = re.sub(r"train_time(_ms: |:)(\d)", r"train_time\g<1>1\2", path.read_text())
        path.write_text(text)
    assert ledger.main(["list", str(timed), "--write"]) == 0
    assert findings(timed, capsys) == []
    measured = ledger_records.read_record(timed / NEWEST).measured
    assert not ledger_records.shows_gain(measured | {"times": None}, "time")
    slow = measured | {"times": measured["times"] | {"jobs": 2}}
    assert not ledger_records.shows_gain(slow, "time")


# -----------------------------------------------------------------------------
# Verification
# -----------------------------------------------------------------------------


def test_true_records_are_verified(records, capsys):
    assert findings(records, capsys) == []
    assert findings(records / NEWEST, capsys) == []


def test_our_own_records_are_verified():
    assert ledger.main(["verify"]) == 0


def test_no_records_is_said(tmp_path, capsys):
    assert ledger.main(["verify", str(tmp_path)]) == 0
    assert "no records" in capsys.readouterr().out


def leaves(value, path=()):
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [leaf for key, item in items for leaf in leaves(item, (*path, key))]
    return [path]


def test_every_altered_digit_of_a_record_is_found(records, capsys):
    path = records / NEWEST / "record.json"
    true = path.read_text()
    changed = 0
    for leaf in leaves(json.loads(true)["measured"]):
        if "runs" in leaf and leaf[leaf.index("runs") + 1] not in (0, SEEDS - 1):
            continue  # of the runs, the first and the last
        content = json.loads(true)
        holder = content["measured"]
        for key in leaf[:-1]:
            holder = holder[key]
        text = str(holder[leaf[-1]])
        digit = re.search(r"\d(?=\D*$)", text)
        if digit is None:
            continue
        text = text[: digit.start()] + str((int(digit[0]) + 1) % 10) + text[digit.end() :]
        holder[leaf[-1]] = type(holder[leaf[-1]])(text)
        path.write_text(json.dumps(content))
        name = "measured." + ".".join(map(str, leaf))
        found = ledger_verify.claims_against_logs(ledger_records.read_record(path.parent))
        assert any(f"{name} is" in line for line in found), name
        changed += 1
    assert changed > 50
    path.write_text(true)
    assert findings(records, capsys) == []


SPOILED = {
    "one changed character of the script": (
        f"{NEWEST}/train_gpt.py", "step % 10", "step % 11", "gpt.py: Training differs"),
    "the parent's script": (
        f"{PARENT}/train_gpt.py", "step % 10", "step % 11", f"{PARENT}: logs/seed-0.txt: was not"),
    "a hyperparameter of the script": (
        f"{NEWEST}/train_gpt.py", "loss: float = 1.5", "loss: float = 1.4", "Hyperparameters diff"),
    "a value of the preset": (
        f"{NEWEST}/train_gpt.py", "val_tokens=262_144)", "val_tokens=262_144, muon_lr=0.1)",
        "has muon_lr 0.05, its preset today has 0.1"),
    "what a record's own sections use of Setup": (
        f"{NEWEST}/train_gpt.py", "WIDTH = 100", "WIDTH = 99", "gpt.py: Setup differs"),
    "a shared section": (
        f"{NEWEST}/train_gpt.py", "return loss", "return 0.9 * loss", "section Validation is not"),
    "a shared section of the root's script": (
        "../train_gpt.py", "return loss", "return 0.9 * loss", f"{PARENT}: train_gpt.py's section"),
    "a shared function with another meaning": (
        f"{NEWEST}/train_gpt.py", "def train(", "def validate(loss):\n    return 0\n\ndef train(",
        "gives validate, which a shared section defines"),
    "a shared function replaced within another": (
        f"{NEWEST}/train_gpt.py", "def train(", "def cheat():\n    global validate\n\ndef train(",
        "gives validate, which a shared section defines"),
    "a section too many": (
        f"{NEWEST}/train_gpt.py", "# ---- Training", "# ---- Validation ----\n# ---- Training",
        "Validation, Validation, Training, not the root script's"),
    "a docstring with another parent": (
        f"{NEWEST}/train_gpt.py", f"Parent: {PARENT}.", "Parent: 2025-01-01_No.",
        f"does not say `Parent: {PARENT}.`"),
    "a docstring without a change": (
        f"{NEWEST}/train_gpt.py", "Change: less loss.", "", "does not say `Change: …`"),
    "a README with another title": (
        f"{NEWEST}/README.md", f"# {NEWEST}", f"# {PARENT}", "README.md's title is"),
    "a claimed gain in time": (
        f"{NEWEST}/record.json", '"gain": "loss"', '"gain": "time"', "its runs show none"),
    "a gain of no kind": (
        f"{NEWEST}/record.json", '"gain": "loss"', '"gain": "fame"', "claim.gain is 'fame'"),
    "a gain over nothing": (
        f"{PARENT}/record.json", '"gain": null', '"gain": "loss"', "gain is made without a parent"),
    "the rules' table": ("README.md", "| 1.64 |", "| 1.74 |", "README.md is not what"),
    "a seed that is another run's": (
        f"{NEWEST}/logs/seed-4.txt", "\nmuon_lr: 0.05", "\nmuon_lr: 0.5", "has muon_lr 0.5, its"),
    "a resumed run": (
        f"{NEWEST}/logs/seed-4.txt", "step:31/40", "resumed at step:30 from a.pt\nstep:31/40",
        "seed-4.txt: is a resumed run"),
    "a simulated GPU": (
        f"{NEWEST}/logs/seed-4.txt", "device: cpu (fake)", "device: host standing in for an H100",
        "host standing in for an H100, which measures nothing"),
    "a parent run with fewer threads": (
        f"{NEWEST}/logs/parent-seed-0.txt", "threads: 1", "threads: 2", "with another threads: 2"),
    "the root's script": ("../train_gpt.py", "step % 10", "step % 11", "not the root's"),
    "a loss in a log": (
        f"{NEWEST}/logs/seed-1.txt", "\nval_loss: 1", "\nval_loss: 2", "final val_loss"),
    "a time in a log": (
        f"{NEWEST}/logs/seed-1.txt", "train_time_ms: 1", "train_time_ms: 2", "final train_time_ms"),
    "the torch of a log": (
        f"{NEWEST}/logs/seed-1.txt", "torch: 2.13.0+cpu", "torch: 2.11.0", "differ in torch"),
    "a hyperparameter of one seed": (
        f"{NEWEST}/logs/seed-2.txt", "num_iterations: 40", "num_iterations: 41",
        "differ in num_iterations"),
    "the source's hash in a log": (
        f"{NEWEST}/logs/seed-1.txt", "source sha256: ", "source sha256: 0", "seed-1.txt"),
    "the table": ("README.md", "1.5", "1.4", "README.md"),
    "a record's README": (f"{NEWEST}/README.md", "n = 10", "n = 11", "README.md"),
    "a README without its region": (f"{NEWEST}/README.md", "<!-- ledger:begin -->", "", "no lines"),
    "an unknown parent": (
        f"{NEWEST}/record.json", f'"{PARENT}"', '"2026-01-01_No"', "2026-01-01_No/train_gpt.py"),
    "a parent run elsewhere": (
        f"{NEWEST}/logs/parent-seed-0.txt", "cpu (fake)", "cuda", "with another device: cuda"),
    "a claim without a source": (
        f"{PARENT}/record.json", '"source"', '"sauce"', "published.source"),
    "a claim of another kind": (f"{PARENT}/record.json", "15.2", '"15"', "published.minutes"),
    "a claim without a meaning": (f"{PARENT}/record.json", '"change"', '"chance"', "claim.chance"),
    "a measured key that is gone": (
        f"{NEWEST}/record.json", '"val_loss_std"', '"std"', "val_loss_std is missing"),
    "a number twice": (f"{NEWEST}/record.json", '"number": 2', '"number": 1', "do not rise"),
}  # fmt: skip


@pytest.mark.parametrize("digits", ["49", "50", "51"])
def test_a_rounded_loss_is_no_finding(digits, records):
    # 1.5012499… is 1.5012 in its step's line and 1.501250 in the final block, rounded twice.
    path = records / NEWEST / "logs" / "seed-0.txt"
    text = re.sub(r"step:40/40 val_loss:\S+", "step:40/40 val_loss:1.5012", path.read_text())
    path.write_text(re.sub(r"\nval_loss: \S+", f"\nval_loss: 1.5012{digits}", text))
    found = ledger_verify.log_findings(ledger_logs.read_log(path), CHILD)
    assert bool(found) == (digits == "51") and len(found) < 2


def test_a_record_that_cannot_be_shown_is_named(records, capsys):
    edit(records / NEWEST / "record.json", '"val_loss_std"', '"std"')
    for verb in ("list", "lineage"):
        capsys.readouterr()
        assert ledger.main([verb, str(records)]) == 2
        err = capsys.readouterr().err
        assert f"{NEWEST}/record.json cannot be shown" in err and err.count("\n") == 1


@pytest.mark.parametrize("what", SPOILED)
def test_verify_finds(what, records, capsys):
    file, old, new, words = SPOILED[what]
    edit(records / file, old, new)
    found = findings(records, capsys)
    assert any(words in line for line in found), found


def test_verify_finds_missing_and_surplus_seeds(records, capsys):
    logs = records / NEWEST / "logs"
    (logs / "seed-1.txt").rename(records / "kept")
    found = findings(records, capsys)
    assert any("logs/seed-1.txt is claimed and missing" in f for f in found)
    assert any("has the seeds 0, 2, 3, 4, 5, 6, 7, 8, 9, not all from 0 on" in f for f in found)
    assert any("has 9 seeds, by the rules 10 are the least" in f for f in found)
    assert any("its parent was run with 10 seeds, itself with 9" in f for f in found)
    (records / "kept").rename(logs / "seed-10.txt")  # the same seed under another name
    shutil.copy(logs / "seed-2.txt", logs / "seed-1.txt")
    found = findings(records, capsys)
    assert any("has seed 2 twice" in line for line in found)
    shutil.rmtree(logs)
    assert any("cannot be measured" in line for line in findings(records, capsys))


def test_older_records_need_fewer_seeds(records, capsys):
    for name in (PARENT, NEWEST):
        for prefix in ("", "parent-"):
            for seed in range(5, SEEDS):
                (records / name / "logs" / f"{prefix}seed-{seed}.txt").unlink(missing_ok=True)
    assert ledger.main(["list", str(records), "--write"]) == 0
    found = findings(records, capsys)
    assert len(found) == 2 and all(line.startswith(f"{NEWEST}: logs/") for line in found)
    assert all("has 5 seeds, by the rules 10 are the least" in line for line in found)


def sha_of(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()


def forge(records: Path, *pairs: tuple[str, str], logs: bool = True) -> None:
    """Change scripts, and with `logs` all that was made with them, as if they had been run so."""
    scripts = [*records.glob("*/train_gpt.py"), records.parent / "train_gpt.py"]
    pairs = list(pairs)
    for script in scripts:
        text = script.read_text()
        for old, new in pairs:
            text = text.replace(old, new)
        pairs.append((sha_of(script.read_text()), sha_of(text)))
        script.write_text(text)
    for path in records.glob("*/logs/**/*.txt") if logs else ():
        text = path.read_text()
        for old, new in pairs:
            text = text.replace(old, new)
        path.write_text(text)
    assert ledger.main(["list", str(records), "--write"]) == 0


@pytest.mark.parametrize(
    "pairs, words",
    [
        ([("target_loss=1.64", "target_loss=1.7"), ("target_loss: 1.64", "target_loss: 1.7")],
         "has target_loss 1.7, by the rules it is 1.64"),
        ([("val_tokens=262_144", "val_tokens=1024"), ("val_tokens: 262144", "val_tokens: 1024")],
         "has val_tokens 1024, by the rules it is 262144"),
        ([("pocket_val_*", "easy_val_*")], "has val_files data/pocket/easy_val_*.bin, by the"),
        ([('"pocket": dict', '"puddle": dict'), ("preset: pocket", "preset: puddle")],
         "was made with --preset puddle, which the rules do not have"),
        ([("cpu (fake)", "host standing in for an H100")], "which measures nothing"),
    ],
)  # fmt: skip
def test_verify_finds_rules_that_a_record_made_itself(pairs, words, records, capsys):
    """Where everything agrees but the rules: each finding is of them."""
    forge(records, *pairs)
    found = findings(records, capsys)
    assert len(found) == 3 * SEEDS and all(words in line for line in found)


def test_machines_that_differ_between_rows_are_in_the_table(records):
    for name in ("seed", "parent-seed"):
        for path in (records / NEWEST / "logs").glob(f"{name}-*.txt"):
            path.write_text(path.read_text().replace("cpu (fake)", "cpu (other)"))
    assert ledger.main(["list", str(records), "--write"]) == 0
    table = (records / "README.md").read_text()
    assert "| Machine |" in table and "Measured on" not in table
    assert "cpu (fake), 1 thread," in table and "cpu (other), 1 thread," in table


MAINTENANCE = {
    "a shared section": [("def validate(loss):", "def validate(loss):\n    # as it was")],
    "an import for a shared section": [
        ("import random", "import gzip\nimport random"), ("string.digits", "str(gzip)")],
    "another preset": [('PRESETS = {"record": {}', 'PRESETS = {"record": {}, "lab": dict(loss=9)')],
    "a preset written otherwise": [("target_loss=1.64,", "target_loss=164 / 100,")],
    "a docstring": [("A run's log without a run.", "A log, and no run.")],
}  # fmt: skip


@pytest.mark.parametrize("what", MAINTENANCE)
def test_maintenance_of_what_is_shared_makes_no_log_stale(what, records, capsys):
    forge(records, *MAINTENANCE[what], logs=False)
    assert findings(records, capsys) == []
    assert capsys.readouterr().err == ""  # findings() has read it
    assert ledger.main(["verify", str(records)]) == 0
    assert f"{NEWEST}: the shared sections are newer than its logs" in capsys.readouterr().err


def test_replay_compares_losses_to_the_digit(records, capsys):
    assert ledger.main(["verify", str(records), "--replay", "2"]) == 0
    assert capsys.readouterr().err.count("run again it has the same val_loss, 1.") == 4
    forge(records, ("return loss", "return loss + 1e-6"), logs=False)
    assert findings(records, capsys) == []
    assert ledger.main(["verify", str(records), "--replay", "1"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 2 and all("logs/seed-0.txt: run again it has val_loss 1." in f for f in out)


def test_replay_says_where_the_machine_is_another(records, capsys):
    forge(records, ("+ noise_of", "+ 0.001 + noise_of"), logs=False)  # other losses
    for path in records.glob("*/logs/*.txt"):
        path.write_text(path.read_text().replace("2.13.0+cpu", "2.11.0"))
    assert ledger.main(["list", str(records), "--write"]) == 0
    ledger.main(["verify", str(records / NEWEST), "--replay", "1"])
    out, err = capsys.readouterr()
    assert "run again it has" not in out
    assert re.search(r"run again with torch 2.13.0\+cpu instead of 2.11.0: val_loss 1\.\d+, its "
                     r"log has 1\.\d+", err)  # fmt: skip


def test_verify_finds_a_target_that_is_not_met(tmp_path, capsys):
    records = make_records(tmp_path)
    poor = SCRIPT.replace("loss: float = 1.6\n", "loss: float = 1.641\n")
    (records / PARENT / "train_gpt.py").write_text(poor)
    shutil.rmtree(records / NEWEST)
    (tmp_path / "train_gpt.py").write_text(poor)
    flags = ["--seeds", str(SEEDS), "--out", str(tmp_path / "out")]
    assert ledger.main(["run", str(records / PARENT), *flags]) == 0
    assert ledger.main(["list", str(records), "--write"]) == 0
    (found,) = findings(records, capsys)
    assert "claims to meet the target" in found


def test_verify_finds_a_gain_that_is_none(records, capsys):
    """The child is as its parent in all that its logs say, and claims to be better."""
    logs = records / NEWEST / "logs"
    shas = [sha_of(SCRIPT), sha_of(CHILD)]
    for seed in range(SEEDS):
        ours, parents = (logs / f"{prefix}seed-{seed}.txt" for prefix in ("", "parent-"))
        text = parents.read_text().replace(*shas).replace("loss: 1.6\n", "loss: 1.5\n")
        whole = f"source sha256: {shas[1]}\n"
        ours.write_text(text.replace(whole, CHILD + "\n") if seed == 0 else text)
    assert ledger.main(["list", str(records), "--write"]) == 0
    (found,) = findings(records, capsys)
    assert found == f"{NEWEST}: it claims a gain in loss over its parent, and its runs show none"
    edit(records / NEWEST / "record.json", '"gain": "loss"', '"gain": null')
    assert findings(records, capsys) == []


def test_verify_finds_wrong_folders(records, capsys):
    shutil.copytree(records / NEWEST, records / "2026-13-01_Third")
    (records / "2026-03-03_Fourth").mkdir()
    found = "\n".join(findings(records, capsys))
    assert "2026-13-01_Third: the folder's name" in found
    assert "2026-03-03_Fourth: record.json is missing" in found


# -----------------------------------------------------------------------------
# Pictures and bad input
# -----------------------------------------------------------------------------


def test_curves_tell_time_to_loss_and_draw(measured, tmp_path, capsys):
    folder, png = measured / "records", tmp_path / "out.png"
    capsys.readouterr()
    operands = [str(folder / PARENT), str(folder / NEWEST)]
    assert ledger.main(["curves", *operands, "--png", str(png), "--json"]) == 0
    rows = {(row["loss"], row["name"]): row for row in json.loads(capsys.readouterr().out)}
    row = rows[1.64, "Second"]
    record = json.loads((folder / NEWEST / "record.json").read_text())["measured"]
    assert (row["step"], row["time_ms"]) == (20, record["target_time_ms_median"])
    assert row["reached"] == SEEDS and is_drawn(png)
    first = png.read_bytes()
    assert ledger.main(["curves", *operands, "--png", str(png)]) == 0
    assert png.read_bytes() == first
    assert "1.64 (target)" in capsys.readouterr().out


def test_the_lineage_is_drawn(records, capsys):
    assert ledger.main(["lineage", str(records)]) == 0
    assert is_drawn(records / "lineage.png")


