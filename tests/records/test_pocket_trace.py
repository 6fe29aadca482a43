"""The pocket runs the record: in a short run of its preset, resumed once, every statement above the
banner runs but those named here."""

import ast
import itertools
import sys

import numpy as np
import pytest
from lineage import RECORDS, for_each_slowly, some_prefixes
from shards import load_script

FLAGS = dict(preset="pocket", device="cpu", run_id="x", num_iterations=8, save_every=2,
             sequences_per_step=2, val_seq_len=256, val_tokens=600)
# Where a record knows them: each stage has two steps, of which Adam takes one.
SHORT = dict(extension_steps=2, freeze_steps=1, momentum_warmup=2, momentum_cooldown=2,
             sequence_stride=2, prefix_file="prefixes.npy", canonical_file="canonical.npz")

# What one CPU does not reach, by the reason: functions, and how statements begin
FUNCTIONS = dict(
    on_a_gpu="""order_blocks flex_mask document_causal to_fp8 scaled_mm FP8Product.forward
        FP8Product.backward prepare_for_cuda""",
    of_texts_without_documents="consecutive_rows",
)
STATEMENTS = dict(
    on_a_gpu=[
        "q, k, v = (x.flatten(0, 1)",
        "y = flex_attention(",
        "return FP8Product.apply(",
        "raw = FP8Product.apply(",
        "raw = raw.unflatten(0, ",
        "columns = []",
        "for target_S in",
        "is_target_SV =",
        "columns.append(",
        "target_logits_SN = torch.stack(",
        "target_logit_S = (logits_SV * is_target_SV)",
        "losses_S = logits_SV.exp()",
        "return (losses_S * ",
    ],
    of_several_ranks=[
        "self.my_grad = torch.empty_like(",
        "mine = self.my_grad",
        "self.handle = ",
        "self.handle.wait(",
        "shares = list(self.updates.chunk(",
        "dist.all_reduce(self.updates)",
        "whole = self.ranks.all_gather(",
        "dist.all_gather_into_tensor(self.weights",
        "received = x.new_empty(",
        "dist.all_to_all_single(",
        "return received",
    ],
    of_errors=["raise ", "prefixes = np.empty(0)"],
    of_sequences_of_one_block=["return blocks"],
    of_rounding=["return scheduled[-1]"],
    of_sampling=["rows_BT2D = self.read_rows("],
    of_texts_without_documents=["return consecutive_rows("],
)


def statements(tree, prefix=""):
    """(function, first line, last line) of each statement in a function, without its body's."""
    for node in ast.iter_child_nodes(tree):
        name = prefix + getattr(node, "name", "")
        if isinstance(node, ast.ClassDef):
            yield from statements(node, name + ".")
        elif isinstance(node, ast.FunctionDef):
            yield from statements_of(node.body, name)


def statements_of(body, function):
    for node in body:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.FunctionDef):
            yield from statements_of(node.body, node.name)
            continue
        inner = getattr(node, "body", [])
        if not is_text:
            last = inner[0].lineno - 1 if inner else node.end_lineno
            yield function, node.lineno, max(node.lineno, last)
        for part in (inner, getattr(node, "orelse", []), getattr(node, "finalbody", []),
                     *(each.body for each in getattr(node, "handlers", []))):
            yield from statements_of(part, function)


def lines_run(file, last_line, function):
    """The lines of a file up to last_line that run while the function does."""
    seen = set()

    def note_line(frame, event, argument):
        if event == "line":
            seen.add(frame.f_lineno)
        return note_line

    def enter(frame, event, argument):
        code = frame.f_code
        if code.co_filename == file and code.co_firstlineno <= last_line:
            return note_line
        return None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        function()
    finally:
        sys.settrace(before)
    return seen


@pytest.fixture
def data(tmp_path, write_shard):
    """Flags of two training shards, a validation one, tables of prefixes and of forbidden pairs.

    The documents of the first shard are too few for a run, and its last one is long.
    """
    draw = np.random.default_rng(0)

    def write(name, count, last_document):
        tokens = draw.integers(0, 64, count)  # fewer than the classes of a sampled softmax
        begins = draw.random(count) < 1 / 200  # documents that are cut, and shorter ones
        begins[0] = True
        begins[last_document:] = False
        tokens[begins] = 256
        write_shard(tmp_path / name, tokens)

    write("train_0.bin", 2500, last_document=900)
    write("train_1.bin", 3000, last_document=3000)
    write("val_0.bin", 700, last_document=700)
    np.save(tmp_path / "prefixes.npy", some_prefixes(257))
    # Tokens 3 and 7 are never followed by 5, nor 9 by 11 and 13.
    np.savez(tmp_path / "canonical.npz", before=[3, 7, 9], before_ends=[2, 3], after=[5, 11, 13],
             after_ends=[1, 3])
    return dict(train_files="train_*.bin", val_files="val_*.bin")


def unreached(record, run):
    """What does not run above the banner, a line of text for each statement, but what is named."""
    source = record.source
    last_line = source[: source.index("# ==== Harness")].count("\n")
    lines = source.splitlines()
    seen = lines_run(str(record.folder / "train_gpt.py"), last_line, run)
    functions = " ".join(FUNCTIONS.values()).split()
    beginnings = tuple(itertools.chain(*STATEMENTS.values()))
    missed = []
    for function, first, last in statements(ast.parse(source)):
        text = lines[first - 1].strip()
        if first > last_line or function in functions or seen & set(range(first, last + 1)):
            continue
        if not text.startswith(beginnings):
            missed.append(f"{first} {function}: {text}")
    return missed


@for_each_slowly(RECORDS)
def test_the_pocket_runs_every_statement_of_the_record(record, data, tmp_path, monkeypatch):
    script = load_script(record.folder / "train_gpt.py")
    monkeypatch.chdir(tmp_path)
    known = vars(script.Hyperparameters())
    flags = FLAGS | data | {name: value for name, value in SHORT.items() if name in known}
    argv = [f"--{name}={value}" for name, value in flags.items()]

    def run_twice():
        assert script.main(argv) == 0
        assert script.main([*argv, "--resume=logs/x/step-000004.pt", "--head_chunks=2"]) == 0

    missed = unreached(record, run_twice)
    assert not missed, "\n" + "\n".join(missed)
