"""The records, found by their folders; their scripts as modules, and small models of them."""

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

import lineage_oracles
import numpy as np
import pytest
import torch
from conftest import REPO, script_module

STATIONS = lineage_oracles.find_stations()
EOT = 256
BLOCK = 8  # instead of the scripts' 128: as many blocks of fewer tokens
LENGTH = 6 * BLOCK
EXTENSION = 2  # steps of a tiny run after the schedules
BF16_STEP = 2.0**-8  # largest relative error of rounding to bf16's 8 significant bits
EXACT = 1e-9  # of a step or gradient, relative: float64 through some ten matrix products and back
TABLE = "ngram_embed.weight"  # is zero at first, which would give rounding errors alone
SIGNS = "bigram_signs", "ngram_signs"  # buffers of a model
# A tiny run divides the record's by these.
DOCUMENTS = 128  # tokens of a document
CLASSES = 160  # of the sampled softmax


class Record(NamedTuple):
    """A record's folder, and the key of its station: its public number, or the step's name."""

    folder: Path
    key: int | str | None

    @property
    def name(self):
        return self.folder.name

    @property
    def source(self):
        return (self.folder / "train_gpt.py").read_text()

    @property
    def station(self):
        """The oracle that it is held to, or None: it is not public, or has none yet."""
        return STATIONS.get(self.key)


def find_records():
    records = []
    for path in sorted((REPO / "records").glob("20*/record.json")):
        claim = json.loads(path.read_text())
        number = claim["published"] and claim["published"]["number"]
        key = number or path.parent.name.split("_")[1]  # 92a of 2026-08-30_92a_FewerHeads
        records.append(Record(path.parent, key))
    return records


RECORDS = find_records()
HELD = [record for record in RECORDS if record.station]


def for_each(records):
    return pytest.mark.parametrize("record", records, ids=[record.name for record in records])


def for_each_slowly(records):
    """The same of a test that takes seconds: it is `slow` but for the root's record and the newest,
    which has most of what the others have."""
    root = (REPO / "train_gpt.py").read_text()
    params = []
    for record in records:
        is_quick = record.source == root or record == RECORDS[-1]
        marks = [] if is_quick else [pytest.mark.slow]
        params.append(pytest.param(record, id=record.name, marks=marks))
    return pytest.mark.parametrize("record", params)


def since(first):
    """The records that are held to an oracle, from the one with this key on."""
    return [record for record in HELD if record.station.place >= STATIONS[first].place]


def held_since(first):
    return for_each(since(first))


def load(path, block=BLOCK):
    """The script of a folder, as a module with blocks of so many tokens."""
    module = script_module(str((path / "train_gpt.py").relative_to(REPO)), block)
    if hasattr(module, "read_prefixes"):  # without the vocabulary that they are made from
        module.read_prefixes = lambda cfg: torch.from_numpy(some_prefixes(cfg.vocab_size))
    if hasattr(module, "read_forbidden"):  # bits of each pair of tokens, a row for each first one
        module.read_forbidden = lambda cfg: torch.from_numpy(
            np.packbits(some_forbidden(EOT + 16), axis=1, bitorder="little"))
    return module


def some_forbidden(vocab_size):
    """(V, V): some tokens are not followed by some. What the tests read does not keep to it."""
    i, j = np.indices((vocab_size, vocab_size))
    return (i * 31 + j * 17) % 7 == 0


def some_prefixes(vocab_size):
    """Of each third token none, of the others a token with a smaller number."""
    tokens = np.arange(vocab_size)
    return np.where(tokens % 3 == 0, -1, tokens // 2)


@contextlib.contextmanager
def in_float64():
    """New tensors are float64, and not cast to fp32 or bf16."""
    with pytest.MonkeyPatch.context() as patch:
        for cast in ("float", "bfloat16"):
            patch.setattr(torch.Tensor, cast, lambda self: self)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def tiny_sizes(published):
    """What station and script call by one name, in a tiny run of either."""
    sizes = dict(
        model_dim=32, head_dim=16, eot_token=EOT, val_seq_len=LENGTH,
        val_tokens=2 * LENGTH, window_tokens=3 * BLOCK, bigram_rows=97, bigram_width=20,
        sign_rows=32, composed_window=14)
    for name in ("momentum_cooldown", "freeze_steps"):
        sizes[name] = min(2, getattr(published, name, 0))
    if hasattr(published, "blend_from"):
        sizes["blend_from"] = 4
    if hasattr(published, "ngram_rows"):
        sizes["ngram_rows"] = 194
    return sizes


def tiny_station(station, steps=5, **changes):
    """A station of a tiny run of so many scheduled steps. Windows of 1, 2 and 3 blocks, 4 at the
    end and 5 in the last validation, of sequences of 6, or of 2, 4 and 6 where batches grow."""
    lengths = tuple(LENGTH * length // station.seq_lens[-1] for length in station.seq_lens)
    sizes = tiny_sizes(station) | dict(
        seq_lens=lengths, num_iterations=steps, vocab_size=272,
        extension=EXTENSION if station.extension else 0,
        block=BLOCK, max_document=station.max_document // DOCUMENTS, windows=(1, 2, 3, 4),
        first_document=station.first_document and station.first_document // DOCUMENTS,
        table_rows=EOT + 1 if station.table_rows % 128 else 272,
        final_window=5 if station.final_window > station.windows[-1] else 4)
    sizes |= changes
    if hasattr(station, "stage_rows"):
        sizes["stage_rows"] = tuple(tiny_rows(station, steps, sizes["windows"]))
    if hasattr(station, "classes"):
        sizes["classes"] = [[count // CLASSES for count in counts] for counts in station.classes]
    return type(station)(**sizes)


def tiny_rows(station, steps, windows):
    """The stages of a station from #92d on in so many scheduled steps."""
    for row in station.stage_rows:
        end, long = steps + EXTENSION, windows[station.windows.index(row.long)]
        if row.end <= station.num_iterations:
            end = round(steps * row.end / station.num_iterations)
        yield row._replace(
            end=end,
            seq_len=LENGTH * row.seq_len // station.seq_lens[-1],
            max_document=row.max_document // DOCUMENTS, long=long, short=long // 2)


def tiny_flags(script, steps=5, **changes):
    """The same as hyperparameters of a script, which has those that it knows."""
    cfg = script.Hyperparameters()
    extension = EXTENSION if getattr(cfg, "extension_steps", 0) else 0
    flags = tiny_sizes(cfg) | dict(
        num_iterations=steps + extension, extension_steps=extension, vocab_size=EOT + 1,
        vocab_multiple=16, max_document_tokens=2048 // DOCUMENTS, seq_len=LENGTH,
        sequences_per_forward=2, device="cpu", head_chunks=1)
    if hasattr(cfg, "stages"):
        windows = *changes.get("windows", (1, 2, 3, 4)), changes.get("final_window", 5)
        flags["stages"] = tuple(tiny_stages(cfg.stages, windows))
    flags = {k: v for k, v in (flags | changes).items() if hasattr(cfg, k)}
    return dataclasses.replace(cfg, **flags)


def tiny_stages(rows, windows):
    """The rows of a tiny run: long windows of so many blocks, the last one in the last validation;
    lengths in the record's proportions."""
    longest = max(row.seq_len for row in rows)
    published = sorted({row.long_window for row in rows})
    for row in rows:
        window = published.index(row.long_window)
        changes = dict(
            seq_len=LENGTH * row.seq_len // longest,
            long_window=BLOCK * windows[window],
            short_window=BLOCK * max(1, windows[min(window, 3)] // 2),
            max_document_tokens=getattr(row, "max_document_tokens", 0) // DOCUMENTS,
            classes=getattr(row, "classes", 0) // CLASSES)
        yield dataclasses.replace(row, **{k: v for k, v in changes.items() if hasattr(row, k)})


def make_model(script, cfg):
    """A model in which no weight is zero, so that everything has a part."""
    model, generator = script.GPT(cfg), torch.Generator().manual_seed(0)
    model.init_weights(generator)
    if hasattr(model, "read_tables"):
        model.read_tables()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim < 2:
                p.uniform_(0.3, 1.2, generator=generator)
            elif not p.any():
                p.normal_(std=0.1, generator=generator)
    return model
