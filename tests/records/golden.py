#!/usr/bin/env python3
"""Golden numbers: what each record computes in a few tiny steps, to nine digits.

    python tests/records/golden.py                      # list what differs in any record
    python tests/records/golden.py 2025-01-04_SoftCap   # in this one
    python tests/records/golden.py --write RECORD       # add the numbers of a new one

The numbers in golden.toml are from the scripts of commit 9552d96. There every record was held in
float64 against its published script or, where that could not be run, against a model and optimizers
written from its specification: losses agreed to 4e-16 of their size, weights to 4e-10.

A number is written when a record is new: its author shows in the pull request that it is equal to
what was published, or says that nothing like it was, and adds its numbers by `--write`. It is
written anew when it was wrong, and then the file keeps the reason: `--write --why "..."`. It is
never written anew to make a test pass. What changes the text of a record and not what it computes
leaves all numbers as they are, but for the name of a parameter, which costs a line in RENAMED.

A run crosses all stages, with the extension and the last validation. It is the record's own loop
in float64, on one rank of a CPU, with its own rates, decays and layers; sizes, lengths and numbers
of steps are small. Weights and tokens come from a formula (`hashed`), and so does what `regular`
adds to matrices before they are split. Compared are the losses of each step, those of each
validation, and of each parameter in the end two sums: of its entries, and of its entries times
cos(0), cos(1), ... Each may be off by 1e-9 of its size, which is the sum of magnitudes. What is
smaller than in the record is held beside them at its full size: the numbers of tokens, steps and
channels, the number of parameters, and the same two sums of what the schedule has for each step.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import tomllib
import zlib
from pathlib import Path
from typing import NamedTuple
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO / "data"), str(REPO / "records")]
import shards  # noqa: E402
from ledger.records import record_folders  # noqa: E402

RECORDS = {path.name: path for path in record_folders(REPO / "records")}
FILE = Path(__file__).with_suffix(".toml")
TOLERANCE = 1e-9  # of a number's size
RENAMED = {}  # a number's name in today's scripts: in the file, by which weights are made, too


# ---- Formulas ---------------------------------------------------------------
def hashed(name: str, count: int) -> np.ndarray:
    """(count,) float64 from 0 to 1, by a hash of the name and of each index (SplitMix64)."""
    seed = np.uint64(zlib.crc32(name.encode()) << 32)
    x = (np.arange(1, count + 1, dtype=np.uint64) + seed) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(11)) / 2.0**53


def tokens_of(name: str, count: int) -> np.ndarray:
    """(count,) uint16: documents of 1 to 90 tokens, small tokens more often than large ones."""
    tokens = hashed(name, count) * hashed(f"{name}, again", count) * EOT
    tokens = tokens.astype(np.uint16)
    lengths = 1 + (90 * hashed(f"{name}, lengths", count) ** 1.5).astype(int)
    starts = np.cumsum(lengths) - lengths
    tokens[starts[starts < count]] = EOT
    return tokens


def weights_of(name: str, first: torch.Tensor) -> torch.Tensor:
    """Weights as large as the record's first ones, none of them zero; those that were are near 0.1.

    first: the standard deviation of each, or its bound, or the constant itself.
    """
    size = torch.where(first == 0, 0.1, first)
    factor = torch.from_numpy(0.5 + hashed(name, first.numel())).view_as(first)
    if first.ndim > 1:
        sign = torch.from_numpy(hashed(f"{name}, signs", first.numel()) - 0.5).sign()
        factor = factor * sign.view_as(first)
    return size * factor


# ---- How a record is driven -------------------------------------------------
# Here alone stands what knows a script's interface. When that changes this is adapted, so that a
# run keeps its documents, tokens, rows, windows, and weights.
BLOCK = 8  # instead of the scripts' 128
LENGTH = 12 * BLOCK  # of the longest sequences
EOT = 256  # the largest token
VALIDATED = 3  # the step before which a run validates, as after the last one
TWO_PASSES = 1  # the step of two forward passes, a sequence each; all others have one
TABLE = "ngram_table.rows"  # the name of what has no parameter
# Tokens that are seen back, and of a document, by the record's
WINDOWS = {128: 8, 384: 16, 640: 24, 768: 32, 896: 24, 1408: 32, 1664: 40, 2560: 48}
DOCUMENTS = {0: 0, 896: 24, 2048: 56, 3072: 64}
SIZES = dict(
    model_dim=32, head_dim=8, qk_dim=4, mlp_dim=120, channel_groups=8, num_layers=4,
    vocab_size=EOT + 1, vocab_multiple=16, eot_token=EOT, bigram_rows=97, ngram_rows=194,
    sign_rows=32, sweep_margin=8, window_tokens=4 * BLOCK, composed_window=14, attention_cut=44,
    max_document_tokens=56, seq_len=LENGTH, val_seq_len=LENGTH, val_tokens=2 * LENGTH,
    sequences_per_step=2, sequences_per_forward=2, head_chunks=2, device="cpu",
    momentum_warmup=3, momentum_cooldown=3, freeze_steps=2, blend_from=4, period_from=4,
    refresh_every=3, outer_every=3,
)
LAST_STEPS = {298: 14, 250: 10}  # of averages; the first ones are 0 modulo 4, as in the records
# Of a machine, or seen in the schedule
NO_SIZES = "sequences_per_forward", "head_chunks", "device"
NO_SCHEDULES = "stage", "share", "num_targets", "adam_steps", "tables_step"  # tiny runs have them


def load(path: Path):
    """The script of a record's folder as a module."""
    return shards.load_script(path / "train_gpt.py")


def shrink_blocks(script):
    """The tiny run's blocks of attention, and the steps by which a window grows.

    Where a mask does not depend on blocks, larger ones take less time.
    """
    script.BLOCK = BLOCK
    if hasattr(script.Hyperparameters, "stages"):
        script.BLOCK = 4 * BLOCK
    if hasattr(script, "CHUNK"):
        script.CHUNK = BLOCK // 2


def full_size(script) -> dict:
    """What is smaller in a tiny run, as the record has it: a number, or one for each step."""
    cfg = script.Hyperparameters()
    found = {}
    for name in (*SIZES, "num_iterations", "extension_steps", "bigram_width"):
        if hasattr(cfg, name) and name not in NO_SIZES:
            found[f"size {name}"] = [getattr(cfg, name)]
    params = script.GPT(short(cfg)).parameters()
    found["size parameters"] = [sum(param.numel() for param in params)]
    rows = [vars(script.schedule(step, cfg)) for step in range(cfg.num_iterations)]
    for name in rows[0]:
        if name not in NO_SCHEDULES:
            for part, values in parts_of([row[name] for row in rows]).items():
                found[f"schedule {name}{part}"] = values
    return found


def parts_of(values: list) -> dict:
    """What a field of the schedule has over the steps: numbers, or those of each key or place."""
    if not isinstance(values[0], list | dict):
        return {"": values}
    tables = [row if isinstance(row, dict) else dict(enumerate(row)) for row in values]
    keys = dict.fromkeys(key for table in tables for key in table)
    return {f" {key}": [table.get(key, 0.0) for table in tables] for key in keys}


def short(cfg):
    """The record with short sequences. Its parameters do not depend on them, its buffers do."""
    changes = dict(seq_len=LENGTH, val_seq_len=LENGTH)
    if hasattr(cfg, "stages"):
        changes |= rows_of(cfg, lambda row, _: dataclasses.replace(row, seq_len=LENGTH), cfg)
    return dataclasses.replace(cfg, **{k: v for k, v in changes.items() if hasattr(cfg, k)})


def rotary_tables(script, cfg) -> dict:
    """The rotary embedding by the record's own windows, by the steps from which on it differs."""
    def with_windows(row, full):
        windows = dict(long_window=full.long_window, short_window=full.short_window)
        return dataclasses.replace(row, **windows)

    full = script.Hyperparameters()
    sizes = dict(model_dim=64, head_dim=32)  # as many frequencies as show how they slow down
    if hasattr(full, "yarn_window"):
        sizes["yarn_window"] = full.yarn_window
    cfg = dataclasses.replace(cfg, **rows_of(cfg, with_windows, full), **sizes)
    model = script.GPT(cfg)
    found = {}
    last = None
    for step in range(cfg.num_iterations + 1):
        model.set_stage(script.schedule(step, cfg))
        table = model.rotary[:, :32].flatten()
        if last is None or not table.equal(last):
            found[f"rotary from step {step}"] = last = table
    return found


def tiny(script, folder: Path, **changes):
    """The record's hyperparameters, of a tiny run. The folder has its prefixes and pairs."""
    cfg = script.Hyperparameters()
    scheduled, extension = steps_of(cfg)
    sizes = SIZES | dict(
        num_iterations=scheduled + extension,
        extension_steps=extension,
        bigram_width=getattr(cfg, "bigram_width", 768) * SIZES["model_dim"] // 768,
        prefix_file=str(folder / "prefixes.npy"),
        canonical_file=str(folder / "canonical.npz"),
    )
    if hasattr(cfg, "stages"):
        longest = max(row.seq_len for row in cfg.all_stages())
        sizes |= rows_of(cfg, lambda row, _: tiny_stage(row, longest), cfg)
    if hasattr(cfg, "yarn_window"):
        sizes["yarn_window"] = WINDOWS[cfg.yarn_window]
    if hasattr(cfg, "averages"):
        sizes["averages"] = tuple(
            dataclasses.replace(row, last_steps=LAST_STEPS[row.last_steps])
            for row in cfg.averages)
    sizes |= changes
    return dataclasses.replace(cfg, **{k: v for k, v in sizes.items() if hasattr(cfg, k)})


def steps_of(cfg):
    """Scheduled steps, and those of the extension."""
    if hasattr(cfg, "period_from"):
        return 10, 4  # the last step is 1 modulo 4, as in the records
    if hasattr(cfg, "freeze_steps"):
        return 10, 2
    if hasattr(cfg, "matrix_lr"):  # by steps, some of which refresh what an optimizer keeps
        return 8, 0
    if hasattr(cfg, "extension_steps"):  # a third is a whole number of steps, or not, as there
        has_thirds = (cfg.num_iterations - cfg.extension_steps) % 3 == 0
        return 6 if has_thirds else 7, 2
    return 8 if hasattr(cfg, "stages") else 6, 0


def rows_of(cfg, change, other) -> dict:
    """The rows of all stages by their field, each of them change(row, row of the other)."""
    found = dict(stages=tuple(map(change, cfg.stages, other.stages)))
    for name in ("extension", "last_validation"):
        if hasattr(cfg, name):
            found[name] = change(getattr(cfg, name), getattr(other, name))
    return found


def tiny_stage(row, longest):
    """A stage with lengths in the record's proportions."""
    sizes = dict(
        seq_len=LENGTH * row.seq_len // longest,
        long_window=WINDOWS[row.long_window],
        short_window=WINDOWS[row.short_window],
        max_document_tokens=DOCUMENTS[getattr(row, "max_document_tokens", 0)],
        classes=16 * round(getattr(row, "classes", 0) / 2560),
    )
    return dataclasses.replace(row, **{k: v for k, v in sizes.items() if hasattr(row, k)})


def write_tables(folder: Path):
    """Write the prefixes of tokens, and which ids never follow a token, as data/ makes them."""
    token = np.arange(EOT + 1)
    np.save(folder / "prefixes.npy", np.where(token % 3 == 0, -1, token // 2))
    before = [token[token % 7 == rest] for rest in range(7)]
    after = [token[(token + 3 * rest) % 7 == 0] for rest in range(7)]
    np.savez(
        folder / "canonical.npz",
        before=np.concatenate(before), before_ends=np.cumsum([len(ids) for ids in before]),
        after=np.concatenate(after), after_ends=np.cumsum([len(ids) for ids in after]),
    )


class TinyRun:
    """The harness's side of a record's `train`. It is the loader, too."""

    first_step = 0

    def __init__(self, script, cfg):
        self.script = script
        self.cfg = cfg
        self.ranks = script.Ranks(cfg)
        self.model = make_model(script, cfg)
        self.optimizers = script.build_optimizers(self.model, cfg, self.ranks)
        for optimizer in self.optimizers:
            optimizer.dtype = torch.float64  # of Muon's matmuls
            if hasattr(optimizer, "updates"):
                optimizer.updates = optimizer.updates.double()
        for table in self.tables():
            first = torch.zeros(self.cfg.ngram_rows, self.cfg.model_dim)
            table.load_full_state(table.full_state() | dict(rows=weights_of(TABLE, first)))
        self.tokens = tokens_of("training", 8000)
        self.val_tokens = tokens_of("validation", cfg.val_tokens + 1)
        self.place = script.Place()
        self.step = 0
        self.losses, self.validations = [], []
        self.loader = self

    def tables(self):
        """The optimizer of a table that is no parameter."""
        return [optimizer for optimizer in self.optimizers if "rows" in optimizer.state]

    def train(self):
        validate = self.script.validate

        def noted(*args):
            loss = validate(*args)
            self.validations.append(loss)
            return loss

        with mock.patch.object(self.script, "validate", noted):
            self.script.train(self, self.cfg)

    def validate_and_save(self, step, can_save):
        self.step = step
        is_last = step == self.cfg.num_iterations
        if is_last or step == VALIDATED:
            now = self.script.schedule(step, self.cfg)
            self.script.validate(self.model, self.val_tokens, now, self.cfg, self.ranks)
        return is_last

    def next_step(self, now):
        documents = np.flatnonzero(self.tokens == EOT)
        rows, self.place = self.script.cut_rows(
            self.tokens, documents, self.place, now, self.cfg)
        return self.batches(rows)

    def batches(self, rows):
        passes = 2 if self.step == TWO_PASSES else 1
        parts = zip(*(np.split(array, passes) for array in rows))
        return [self.script.to_batch(type(rows)(*part), self.ranks.device) for part in parts]

    def exchange_losses(self, step, losses):
        self.losses.append(losses.tolist())

    def log_step(self, step):
        pass

    def log(self, text):
        pass

    def weights(self):
        """Each parameter in the end, by name, and the table."""
        found = {name: param.detach() for name, param in self.model.named_parameters()}
        for table in self.tables():
            found[TABLE] = table.full_state()["rows"]
        return found


def make_model(script, cfg):
    """The record's model with weights of the formula. What begins as the head does so here."""
    model = script.GPT(cfg)
    model.init_weights(torch.Generator())
    params = {RENAMED.get(name, name): param for name, param in model.named_parameters()}
    tied = "lm_head.weight" in params and params["embed.weight"].equal(params["lm_head.weight"])
    with first_sizes():
        model.init_weights(torch.Generator())
    with torch.no_grad():
        for name, param in params.items():
            begins_as = "lm_head.weight" if tied and name == "embed.weight" else name
            param.copy_(weights_of(begins_as, param))
        for name, buffer in model.named_buffers():
            if name.endswith("signs"):
                signs = np.sign(hashed(RENAMED.get(name, name), buffer.numel()) - 0.5)
                buffer.copy_(torch.from_numpy(signs).view_as(buffer))
    script.prepare(model, cfg, torch.device("cpu"))
    return model


@contextlib.contextmanager
def first_sizes():
    """What draws weights sets all of them to its standard deviation, or to its bound."""
    def normal(self, mean=0.0, std=1.0, generator=None):
        return self.fill_(std)

    def uniform(self, low=0.0, high=1.0, generator=None):
        return self.fill_(high)

    with mock.patch.multiple(torch.Tensor, normal_=normal, uniform_=uniform):
        yield


def regular(split):
    """The function, which is given matrices whose diagonals are a formula larger.

    A tiny run's gradients have few ranks. Where eigenvalues are zero, or alike, nothing but
    rounding would choose among the vectors.
    """
    def split_regular(matrices):
        size = matrices.size(-1)
        diagonal = torch.from_numpy(1 + hashed("diagonal", size)).diag()
        largest = matrices.abs().amax((-2, -1), keepdim=True)
        return split(matrices + size * largest * diagonal)

    return split_regular


@contextlib.contextmanager
def in_float64():
    """New tensors are float64, and not cast to fp32 or bf16. Matrices are split by `regular`."""
    def uncast(self):
        return self

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    splits = dict(eigh=regular(torch.linalg.eigh), qr=regular(torch.linalg.qr))
    try:
        with mock.patch.multiple(torch.Tensor, float=uncast, bfloat16=uncast), \
                mock.patch.multiple(torch.linalg, **splits):
            yield
    finally:
        torch.set_default_dtype(before)


# ---- Numbers ----------------------------------------------------------------
class Number(NamedTuple):
    value: float
    size: float


def sums(x) -> list[Number]:
    """The sum of the entries, and of the entries times cos(index)."""
    x = np.asarray(x, np.float64)
    size = np.abs(x).sum()
    return [Number(x.sum(), size), Number((x * np.cos(np.arange(len(x)))).sum(), size)]


def measure(path: Path) -> dict:
    """The numbers of a record's folder, each a list of one or two `Number`s, by what they are."""
    numbers = {}
    with tempfile.TemporaryDirectory() as folder, in_float64():
        script = load(path)
        for name, values in full_size(script).items():
            is_single = name.startswith("size")
            numbers[name] = list(map(Number, values, values)) if is_single else sums(values)
        write_tables(Path(folder))
        shrink_blocks(script)
        cfg = tiny(script, Path(folder))
        if hasattr(cfg, "last_validation"):
            for name, table in rotary_tables(script, cfg).items():
                numbers[name] = sums(table.numpy())
        run = TinyRun(script, cfg)
        run.train()
    for step, losses in enumerate(run.losses):
        numbers[f"loss {step}"] = [Number(loss, abs(loss)) for loss in losses]
    for index, loss in enumerate(run.validations):
        numbers[f"validation {index}"] = [Number(loss, abs(loss))]
    for name, weight in run.weights().items():
        numbers[name] = sums(weight.numpy().ravel())
    return {RENAMED.get(name, name): found for name, found in numbers.items()}


def differences(numbers: dict, entry: dict) -> list[str]:
    """A line for each number that is missing, unknown, or differs from the file's."""
    lines = []
    for name in entry.keys() - numbers.keys():
        lines.append(f"{name}: in the file, not in the run")
    for name, found in numbers.items():
        expected = entry.get(name, [])
        if len(expected) != len(found):
            lines.append(f"{name}: {len(found)} numbers, {len(expected)} in the file")
            continue
        for (value, size), known in zip(found, expected):
            error = abs(value - known)
            if not error <= TOLERANCE * size:  # NaN is not
                lines.append(f"{name}: {value:.13g}, in the file {known:.13g}, "
                             f"{error / size if size else error:.1e} of its size")
    return lines


# ---- The file ---------------------------------------------------------------
HEAD = """\
# What each record computes in a few tiny steps. `python tests/records/golden.py --write` writes it;
# its docstring says what the steps are, and when a number may be written anew.
#
# commit: the last one of the repository whose script was run
# size x: of the record, where its tiny run has another one; parameters: how many it has
# schedule x: over the steps of the record, the sum, and the sum of each times cos(step)
# rotary: its cosines and sines by the record's windows, from the tiny step on where they change
# loss k: of step k, what is minimised and, where it is another one, the next token's
# validation k: before step 3, after the last one, and after that without the mask of logits
# all others: a parameter in the end, the sum of its entries and of its entries times cos(index)
"""
NOTES = "commit", "replaced"  # keys of an entry that are no numbers


def read_file() -> dict:
    return tomllib.loads(FILE.read_text()) if FILE.exists() else {}


def numbers_of(entry: dict) -> dict:
    """An entry's numbers, without what is noted beside them."""
    return {name: values for name, values in entry.items() if name not in NOTES}


def write_file(entries: dict):
    """Write all entries, a line a number."""
    lines = [HEAD]
    for record, entry in sorted(entries.items()):
        lines.append(f'["{record}"]')
        for name, value in entry.items():
            if name in NOTES:
                text = json.dumps(value)
            else:
                text = "[" + ", ".join(f"{number:.13g}" for number in value) + "]"
            lines.append(f'"{name}" = {text}')
        lines.append("")
    FILE.write_text("\n".join(lines))


# ---- Command line -----------------------------------------------------------
def last_commit() -> str:
    command = ["git", "-C", REPO, "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, text=True, capture_output=True)
    return done.stdout.strip() or "none"  # where there is no repository


def parse_args(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="*", help="names of their folders; none: all")
    parser.add_argument("--write", action="store_true", help="add the numbers of these records")
    parser.add_argument("--why", default="", help="what was wrong, to write known ones anew")
    args = parser.parse_args(argv)
    args.records = args.records or RECORDS
    for record in args.records:
        if record not in RECORDS:
            parser.error(f"{record}: no such record; they are the folders of records/ and of "
                         "records/optimizers/")
        if args.write and record in read_file() and not args.why:
            parser.error(f"{record}: has its numbers; if they were wrong: --why REASON")
    return args


def main(argv=None) -> int:
    """Compare or write. Returns 1 where something differs."""
    args = parse_args(argv)
    torch.set_num_threads(1)
    entries = read_file()
    status = 0
    for record in args.records:
        numbers = measure(RECORDS[record])
        old = entries.get(record, {})
        if args.write:
            entries[record] = dict(commit=last_commit())
            if args.why:
                entries[record]["replaced"] = [*old.get("replaced", []), args.why]
            for name, found in numbers.items():
                entries[record][name] = [number.value for number in found]
            print(f"{record}: written", flush=True)
            continue
        lines = differences(numbers, numbers_of(old)) if old else ["has no numbers in the file"]
        print(f"{record}: {len(lines)} differ", *lines, sep="\n    ", flush=True)
        status |= bool(lines)
    if args.write:
        write_file(entries)
    return status


if __name__ == "__main__":
    sys.exit(main())
