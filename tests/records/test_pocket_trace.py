"""The pocket runs the record: a short run of its preset, resumed once, calls every function above
the banner but those named here."""

import inspect
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
NOT_CALLED = (
    # on a GPU
    "order_blocks", "flex_mask", "flex_mask.<locals>.document_causal", "to_fp8", "scaled_mm",
    "FP8Product.forward", "FP8Product.backward", "prepare_for_cuda",
    # of texts without documents
    "consecutive_rows",
)


def functions_of(code):
    """The qualified names of a module's functions, and of those in its classes and functions."""
    for inner in code.co_consts:
        if inspect.iscode(inner):
            is_function = inner.co_flags & inspect.CO_OPTIMIZED  # the body of a class is not
            if is_function and not inner.co_name.startswith("<"):
                yield inner.co_qualname
            yield from functions_of(inner)


@pytest.fixture
def data(tmp_path, write_shard):
    """Flags of two training shards and a validation one; tables of prefixes and forbidden pairs.

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


@for_each_slowly(RECORDS)
def test_the_pocket_calls_every_function_of_the_record(record, data, tmp_path, monkeypatch):
    path = record.folder / "train_gpt.py"
    script = load_script(path)
    monkeypatch.chdir(tmp_path)
    known = vars(script.Hyperparameters())
    argv = []
    for name, value in (FLAGS | SHORT | data).items():
        if name in known:
            argv.append(f"--{name}={value}")
    called = set(NOT_CALLED)

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_filename == str(path):
            called.add(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        assert script.main(argv) == 0
        assert script.main([*argv, "--resume=logs/x/step-000004.pt", "--head_chunks=2"]) == 0
    finally:
        sys.setprofile(None)
    above_the_banner = record.source.partition("# ==== Harness")[0]
    code = compile(above_the_banner, path, "exec")
    never_called = set(functions_of(code)) - called
    assert never_called == set()
