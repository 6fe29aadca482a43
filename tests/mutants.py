#!/usr/bin/env python3
"""Plant one fault at a time in a copy of the project, and tell which test finds it.

    python tests/mutants.py                    each fault, by the tests of its part
    python tests/mutants.py --only NAME,NAME   these faults, or those of these parts
    python tests/mutants.py --list             the faults

The quick tests shall find each fault, but for those of code that only a GPU runs, which the slow
tests on the stand-in shall find. The exit code is the number of faults that no test found. Where
there are some, a test is missing.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parent.parent
TIMEOUT = 900  # seconds; a fault that hangs the tests is found
TESTS = {  # of each part: the tests that can see its faults, the likeliest first
    "data": ["tests/data"],
    "checkpoints": ["tests/script/test_checkpoints.py", "tests/script/test_survival.py",
                    "tests/script/test_fuzz.py"],
    "script": ["tests/records", "tests/script"],
    "records": ["tests/records/test_lineage.py"],
    "gpu": ["tests/script/test_compile.py", "tests/script/test_wire.py",
            "tests/script/test_fp8.py"],  # then the slow ones of tests/gpu, on a stand-in
    "ledger": ["tests/ledger"]}
TABLE = {  # of each part: the fault, the text that is replaced, what is put there, and the file
    "data": [
        ("the split looks at another byte",
         "digests[path][0] %", "digests[path][1] %", "data/pocket.py"),
        ("a shard may be longer than its header says",
         "st_size != expected_bytes", "st_size < expected_bytes", "data/shards.py"),
        ("sha256 of a download is not looked at",
         "None if sha256 == published.sha256 else", "None if sha256 else", "data/fineweb.py"),
        ("a text is cut before any white space", r'\S(?=[ \n])")', r'\S(?=\s)")', "data/text.py"),
        ("too small a document is validated on",
         "num_val >= MIN_VAL_TOKENS:", "num_val:", "data/text.py"),
        ("a log's code is run unread", "    if not args.script:\n", "    if args.script == log:\n",
         "data/sample.py"),
        ("the model sees a token less",
         "ids[-cfg.val_seq_len:]", "ids[1 - cfg.val_seq_len:]", "data/sample.py"),
        ("own data is fetched for",
         "given --train_files || resumed || [", "resumed || [", "run.sh"),
        ("a small GPU among larger ones is not seen", "min(memory)", "max(memory)", "data/plan.py"),
        ("a step has fewer tokens on a small GPU",
         "sequences_per_step * parts", "sequences_per_step", "data/plan.py"),
        ("a long run has the data of a short one",
         "max(FEWEST_SHARDS, math.ceil(tokens / 1e8))", "FEWEST_SHARDS", "data/plan.py"),
        ("a record is planned by the root",
         "PYTHONPATH=${script%/*}$", "PYTHONPATH=$repo$", "run.sh"),
        ("of two records of one name the root runs", '[ -f "$script" ] || die', ": ||", "run.sh"),
        ("a thread for each hyperthread",
         "thread_siblings_list 2>/dev/null | wc", "no_list 2>/dev/null | wc", "run.sh"),
        ("a signal leaves torchrun's traceback",
         "except api.SignalException", "except OSError", "run.sh")],
    "checkpoints": [
        ("a file is not on the disk before it is renamed",
         "            os.fsync(file.fileno())", "            pass"),
        ("one checkpoint is kept, not two", "saved[:-3]", "saved[:-1]"),
        ("checksums are not looked at", "damaged = file.testzip()", "damaged = None"),
        ("infinite weights are taken",
         "and tensor.isfinite().all()", "and not tensor.isnan().any()"),
        ("auto takes the oldest checkpoint",
         'sorted(folder.glob("step-*.pt"), reverse=True)', 'sorted(folder.glob("step-*.pt"))'),
        ("other training data may be gone on with",
         "if loader.digest != digest:", "if not digest:"),
        ("the data begin anew in a resumed run", "loader=self.loader.place,", "loader=(0, 0),")],
    "script": [
        # Hyperparameters and command line
        ("backout may take a layer that is not there",
         "cfg.backout_layer < layers", "cfg.backout_layer <= layers"),
        ("rates may never fall", "0 < cfg.cooldown_frac <= 1", "0 <= cfg.cooldown_frac <= 1"),
        ("true is false", '["false", "true"].index(', '["true", "false"].index('),
        ("end-of-text may lie above the vocabulary",
         "cfg.eot_token < cfg.vocab_size", "cfg.eot_token <= cfg.vocab_size"),
        ("a resumed run keeps the name of its checkpoint's run",
         'dict(device="auto", run_id="")', 'dict(device="auto")'),
        # Model
        ("the first key takes a part of the last one",
         "torch.cat([first, k_BTHK[:, :-1]], dim=1)", "k_BTHK.roll(1, 1)"),
        ("the window is a token short",
         "(query - key <= BLOCK * window)", "(query - key < BLOCK * window)"),
        ("the smear is gated by the previous token", "channels = current[", "channels = previous["),
        ("rows see each other", "        starts_BT[:, 0] = True\n", ""),
        ("targets of token 0 are not counted",
         "(losses_SN * (targets_SN >= 0))", "(losses_SN * (targets_SN > 0))"),
        # Optimizers
        ("Muon without Nesterov's momentum",
         "nesterov = grad.lerp(mean, momentum)", "nesterov = mean"),
        ("Adam's correction lacks its root",
         "lr * (1 - beta2**count).sqrt()", "lr * (1 - beta2**count)"),
        ("weights decay where the step makes them grow",
         "torch.where(change * old > 0, old, 0)", "torch.where(change * old < 0, old, 0)"),
        ("the tied embedding shares weights but no state",
         "zip(embed.tensors(), head.tensors())", "zip(embed.tensors()[:1], head.tensors())"),
        ("a rank steps by another rank's rows of factors",
         "first = ranks.rank * len(self.my_grad)", "first = 0"),
        # Schedules
        ("Adam rests on the other steps", "adam_rests=step % 2 == 0", "adam_rests=step % 2 == 1"),
        ("rates end too high", "(1 - kept) * 0.1\n", "(1 - kept) * 0.15\n"),
        ("the last validation changes the rotary embedding",
         "cfg.long_windows[:LAST_STAGE]", "cfg.long_windows"),
        ("the head is untied a third later", "tied=stage < 2", "tied=stage < 3"),
        # Training and the run
        ("all stages train with the first one's windows",
         "run.model.set_stage(stage)", "run.model.set_stage(0)"),
        ("documents are not cut",
         "min(ends[position] - start, cfg.max_document_tokens, room)",
         "min(ends[position] - start, room)"),
        ("the clock runs while validating",
         "            self.started = time.perf_counter()\n        self.stopped",
         "        self.stopped"),
        ("the warm-up's steps stay in the weights", "            tensor.copy_(value)  #",
         "            pass  #"),
        ("a signal ends a run in exit code 0",
         "        return 1\n    run.finish()", "        return 0\n    run.finish()"),
        # Data
        ("all ranks take the same sequences", "in parts[self.ranks.rank]]", "in parts[0]]"),
        ("a stride that divides the shard is taken",
         "while math.gcd(stride, N) > 1:", "while stride < 1:"),
        ("a shard's first document is skipped from the second shard on",
         "self.begin_shard(shard + 1)", "self.begin_shard(shard + 1, 1)"),
        # Validation
        ("the mean has a token too many", ".sum().item() / count", ".sum().item() / (count + 1)"),
        ("ranks validate on overlapping parts",
         "range(ranks.rank * size, count,", "range(0, count,"),
        # Ranks and log
        ("two runs of one name write one log", "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_UN"),
        ("the log has the loss of the first rank",
         "*self.losses, stops = rows.mean(0)", "*self.losses, stops = rows[0]"),
        ("a signal to another rank stops nothing",
         "stopping = stops > 0", "stopping = bool(rows[0, -1])"),
        ("a file may be trained and validated on",
         "if set(loader.files) & set(find_shards(cfg.val_files)):", "if not loader.files:")],
    "gpu": [
        ("the window of FlexAttention is a token short",
         "(q - k <= BLOCK * window)", "(q - k < BLOCK * window)"),
        ("the backward pass goes over the wrong blocks",
         "order_blocks(partial.T.contiguous())", "order_blocks(partial.contiguous())"),
        ("the FP8 gradient of the weight has another scale",
         "unscale_w = 1 / (FP8_GRAD_SCALE * FP8_X_SCALE)",
         "unscale_w = 1 / (FP8_GRAD_SCALE * FP8_W_SCALE)"),
        ("the loss takes the logit of another token",
         "target_S[:, None] == ids_V\n", "target_S[:, None] == ids_V + 1\n"),
        ("FP8 on a GPU that has none", ">= (8, 9)", ">= (8, 0)"),
        ("gates stay in fp32",
         're.search("embed|gate|head", name)', 're.search("embed|head", name)'),
        ("the host waits for each step", "self.read(late=int(news.is_cuda))", "self.read()"),
        ("the host waits for each copy of a batch",
         "tokens = tokens.to(device, non_blocking=True)", "tokens = tokens.to(device)"),
        ("Newton-Schulz in fp32",
         "torch.bfloat16 if self.lr.is_cuda else torch.float32", "torch.float32")],
    "ledger": [
        ("a seed that was run twice is taken",
         "sorted(seeds) != [*range(len(seeds))]", "{*seeds} != {*range(len({*seeds}))}",
         "records/ledger/verify.py"),
        ("a seed under another number is taken",
         "if seed != seeds[-1]:", "if seed == seeds[-1] != seed:", "records/ledger/verify.py"),
        ("runs of a parent elsewhere are compared",
         "theirs.get(name, [])", "[*itertools.chain(*theirs.values())]", "records/ledger/table.py"),
        ("four pairs are a gain in time",
         'found["n"] < SEEDS[gain]', 'found["n"] < SEEDS[gain] - 1', "records/ledger/table.py"),
        ("another run takes a filed log's place",
         "if target.exists() and read_log(target).body != log.body:", "if not target.parent:",
         "records/ledger/verify.py"),
        ("the mean of many seeds may move as one does",
         "/ math.sqrt(len(shifts))", "/ 1", "records/ledger/run.py"),
        ("a model may see later tokens",
         "moved.abs().max().item() > 1e-3", "moved.abs().max().item() > 1e3",
         "records/ledger/run.py"),
        ("the judge's softmax is the record's",
         "losses = log_sum(logits, -1)", "losses = logits.logsumexp(-1)", "records/ledger/run.py"),
        ("a loss edited in a log's end is taken",
         '("val_loss", loss, 5.06e-5)', '("val_loss", loss, 10)', "records/ledger/verify.py"),
        ("a resumed run is taken",
         "if log.resumed:", "if log.resumed and not log.finished:", "records/ledger/verify.py"),
        ("runs of two machines are taken",
         "if len(values) > 1:", "if len(values) > 2:", "records/ledger/verify.py"),
        ("p is that of a mean above the target",
         'alternative="less"', 'alternative="greater"', "records/ledger/table.py"),
        ("runs of different seeds are paired",
         'if run["seed"] == other["seed"]:', 'if run["seed"] <= other["seed"]:',
         "records/ledger/table.py"),
        ("one faster run is a gain in time",
         'found["slowest"] < 1', 'found["fastest"] < 1', "records/ledger/table.py"),
        ("an ablation that misses the target is the record",
         "-len(self.logs), misses, ms", "-len(self.logs), ms", "records/ledger/public.py")]}


class Fault(NamedTuple):
    """A text that stands once in a file, and the wrong one that is put in its place."""

    part: str
    name: str
    old: str
    new: str
    file: str = "train_gpt.py"


def read_faults() -> list[Fault]:
    """All faults: the table's, and those of the file beside the records' tests."""
    faults = [Fault(part, *row) for part, rows in TABLE.items() for row in rows]
    text = (REPO / "tests" / "records" / "faults.txt").read_text()
    for section in text.split("\n== ")[1:]:
        record, _, rows = section.partition("\n")
        for name, old, new in re.findall(r"^(.+)\n- (.+)\n\+ (.+)$", rows, re.MULTILINE):
            faults.append(Fault("records", name, old, new, f"records/{record}/train_gpt.py"))
    return faults


FAULTS = read_faults()


def copy_project(folder: Path) -> None:
    """Copy the files that git knows or would add, and link the data that tests only read."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=REPO, check=True, capture_output=True, text=True).stdout
    for name in names.split("\0"):
        if (REPO / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO / name, folder / name)
    if (REPO / "data" / "pocket").is_dir():
        (folder / "data" / "pocket").symlink_to(REPO / "data" / "pocket")


def run_tests(part: str, fault: Fault | None = None) -> tuple[bool, str]:
    """Run a part's tests in a copy with the fault. Return whether one failed, and which."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-rfE", "--tb=no", "--no-header",
              "-p", "no:cacheprovider"]
    runs = [TESTS[part]]
    if part == "gpu":
        runs.append(["tests/gpu", "-m", "gpu"])
    failed = []
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = Path(name)
        copy_project(folder)
        if fault:
            sound = (folder / fault.file).read_text()
            if sound.count(fault.old) != 1:
                return False, f"its text stands {sound.count(fault.old)} times"
            # In the records too, or it would be found by their bytes alone.
            for path in [folder / fault.file, *folder.glob(f"records/*/{fault.file}")]:
                path.write_text(path.read_text().replace(fault.old, fault.new))
        if part == "records" and fault:
            runs[0] = [*runs[0], "-k", fault.file.split("/")[1]]
        for tests in runs:
            try:
                done = subprocess.run([*pytest, *tests], cwd=folder, text=True, timeout=TIMEOUT,
                                      env={**os.environ, "OMP_NUM_THREADS": "1"},
                                      stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                      stderr=subprocess.STDOUT)
            except subprocess.TimeoutExpired:
                return True, f"nothing ended within {TIMEOUT} s"
            failed = re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
            if failed:
                break
    return bool(failed), failed[0] if failed else done.stdout.strip().rpartition("\n")[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--only", metavar="NAME,NAME", help="names or parts (default: all faults)")
    parser.add_argument("--list", action="store_true", help="print the faults and end")
    args = parser.parse_args()
    wanted = args.only.split(",") if args.only else list(TESTS)
    faults = [fault for fault in FAULTS if fault.part in wanted or fault.name in wanted]
    if not faults:
        parser.error(f"--only {args.only}: no such fault; --list shows them")
    if args.list:
        for fault in faults:
            print(f"{fault.part:12} {fault.file:48} {fault.name}")
        return 0

    def judge(fault: Fault) -> tuple[bool, str, float]:
        start = time.monotonic()
        return *run_tests(fault.part, fault), time.monotonic() - start

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = sorted({fault.part for fault in faults})
        for failed, words in pool.map(run_tests, parts):
            if failed:  # what fails anyway finds no fault
                parser.error(f"without any fault there fails {words}")
        width = max(len(fault.name) for fault in faults)
        print(f"{'part':12} {'fault':{width}} seconds  found by")
        missed = 0
        for fault, (found, words, seconds) in zip(faults, pool.map(judge, faults)):
            missed += not found
            print(f"{fault.part:12} {fault.name:{width}} {seconds:7.0f}  "
                  f"{words if found else f'NO TEST: {words}'}", flush=True)
    print(f"{len(faults) - missed} of {len(faults)} faults found")
    return missed


if __name__ == "__main__":
    sys.exit(main())
