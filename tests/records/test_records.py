"""What golden numbers in float64 leave out: names, pockets, types and FP8."""

import ast
import dataclasses
import functools
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import REPO
from ledger.records import ladder_of
from record_folders import (
    LADDERS,
    RECORDS,
    first_of_its_kind,
    for_each,
    for_each_slowly,
    having,
    is_retold,
    load,
    one_of_each_kind,
    parent_of,
    source,
)

BF16_STEP = 2.0**-8  # largest relative error of rounding to bf16's 8 significant bits
FP32_EPS = 2.0**-23  # what the norm adds to the mean square of fp32


@pytest.fixture
def script(record):
    return load(record)


@for_each(RECORDS)
def test_each_place_of_a_docstrings_map_is_there(script):
    rows = script.__doc__.partition("\nTechnique ")[2].splitlines()[1:]
    assert len(rows) >= 3
    for row in rows:
        for place in re.split("  +", row)[1].split(", "):
            assert functools.reduce(getattr, place.split("."), script), row


@for_each(RECORDS)
def test_what_a_page_names_of_its_change_is_in_the_scripts(record):
    """Under "See the change": in the record's, or in its parent's where it is gone."""
    page = (record / "README.md").read_text()
    told = page.partition("## See the change")[2].partition("<details>")[0]
    parent = parent_of(record)
    scripts = source(record) + (source(parent) if parent else "")
    for name in re.findall(r"`([A-Za-z_][\w.]*)`", told):
        assert name.rpartition(".")[2] in scripts, name


@for_each_slowly([REPO, *RECORDS])
def test_lines_and_functions_fit_a_screen(record):
    """The linter leaves out the records, and counts no function's lines."""
    text = source(record) if record in RECORDS else Path(record, "train_gpt.py").read_text()
    assert max(map(len, text.splitlines())) <= 100
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 60, node.name


@for_each(RECORDS)
def test_the_pockets_of_a_ladder_have_one_width_depth_and_target(record, script):
    """And sequences for up to eight ranks, as the records."""
    newest = load(LADDERS[ladder_of(record)][-1])
    cfg, other = (x.parse_args(["--preset", "pocket"]) for x in (script, newest))
    depth, depth_of_other = (len(getattr(x, "layers", "")) or x.num_layers for x in (cfg, other))
    assert depth == depth_of_other
    same = """model_dim head_dim vocab_size eot_token val_tokens val_files train_files target_loss
        num_iterations""".split()
    assert [getattr(cfg, x) for x in same] == [getattr(other, x) for x in same]
    record = script.Hyperparameters()
    assert cfg.sequences_per_step % 8 == record.sequences_per_step % 8 == 0


def tokens_of_pocket(script):
    cfg = script.parse_args(["--preset", "pocket"])
    return script.planned_tokens(cfg)[-1]


def test_the_pockets_of_one_table_of_stages_train_on_as_many_tokens():
    """From the first record whose batches grow in three stages to the last one before five."""
    in_stages = [load(record) for record in having("extension") if is_retold(record)]
    three = [x for x in in_stages if len(x.Hyperparameters.stages) == 3]
    grow = [x for x in three if len({row.seq_len for row in x.Hyperparameters.stages}) == 3]
    assert len(grow) > 10
    # From #70 on the borders of stages are rounded, which gives the last one two steps more.
    rounded = [x for x in grow if Path(x.__file__).parent.name >= "2026-02-03"]
    assert len({tokens_of_pocket(x) for x in grow if x not in rounded}) == 1
    assert len({tokens_of_pocket(x) for x in rounded}) == 1
    assert len({tokens_of_pocket(x) for x in in_stages if x not in three}) == 1


@for_each(one_of_each_kind(LADDERS["time"], "norm"))
def test_the_norm_adds_the_epsilon_of_its_day(record, script):
    """To the mean square of bf16 2^-7, of fp32 2^-23; since #21 always that. #2 and #4: 1e-6."""
    day = first_of_its_kind(record, "norm").name
    generator = torch.Generator().manual_seed(0)
    # Rows of all sizes: in the smallest, the epsilon is nearly all there is.
    x = torch.randn(200, 64, generator=generator)
    x *= torch.logspace(-5, 1, 200)[:, None]
    is_fixed = day >= "2025-01-26_BatchSize"
    for dtype, eps in ((torch.bfloat16, 2.0**-7), (torch.float32, FP32_EPS)):
        given = x.to(dtype)
        exact = given.double()
        mean_square = exact.square().mean(-1, keepdim=True)
        if day < "2024-10-14":
            eps = 1e-6
        exact /= (mean_square + (FP32_EPS if is_fixed else eps)).sqrt()
        found = script.norm(given)
        assert found.dtype == dtype
        rounding = BF16_STEP if dtype == torch.bfloat16 else 4 * FP32_EPS
        error = (found.double() - exact).abs()
        assert (error <= 1.01 * rounding * exact.abs()).all()


@for_each(one_of_each_kind(RECORDS, "prepare"))
@pytest.mark.filterwarnings("ignore:CUDA is not available:UserWarning")
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=["A100", "H100"])
def test_fp8_is_for_cards_that_have_it(script, capability, monkeypatch):
    """A GPU that torch.cuda pretends to have."""
    properties = SimpleNamespace(shared_memory_per_block_optin=227 * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *args: properties)
    cfg = script.Hyperparameters()
    files = {name: "" for name in ("prefix_file", "canonical_file") if name in vars(cfg)}
    cfg = dataclasses.replace(cfg, **files)
    with torch.device("meta"):
        model = script.GPT(cfg)
    model.compile = lambda **kwargs: None
    script.prepare(model, cfg, torch.device("cuda", 0))
    if hasattr(script, "FP8Product"):
        assert model.lm_head.use_fp8 == (capability == (9, 0))
    bf16 = {p.dtype == torch.bfloat16 for p in model.parameters() if getattr(p, "bf16", False)}
    assert bf16 <= {True}
