"""What the model of a GPU's time counts: kernels whose bytes and times are known."""

import json

import bench
import gpu_tables
import pytest
import torch
from conftest import REPO
from host_gpu import cost
from host_gpu.trace import EXACT_SUMS, KernelStandIn, Notes, Recorder, Trace
from shards import load_script

KERNEL = """
# 'kernel_num_gb': {gigabytes}
def fused({arguments}, xnumel, XBLOCK : tl.constexpr):
    {body}
"""
RATES = cost.Rates(bandwidth=1e9, bf16=1e12, fp8=2e12, newton_schulz=1e12, attention=1e12, bus=1e9,
                   fp32=1e11, qr=1e10)


def bytes_of(body, arguments, gigabytes, *tensors) -> float:
    notes = Notes()
    notes.phase = "pass of 0"
    names = ", ".join(arguments)
    source = KERNEL.format(gigabytes=gigabytes, arguments=names, body=body)
    KernelStandIn(notes, "fused", source).run(*tensors, tensors[0].numel())
    return notes.launches[0]["bytes"]


@pytest.mark.parametrize(("body", "passes"), [
    ("tl.load(in_out_ptr0 + (x0))", 1),  # in place, but never stored
    ("tl.load(in_out_ptr0 + (x0)); tl.load(in_out_ptr0 + (x0))", 1),
    ("tl.load(in_out_ptr0 + (x0)); tl.store(in_out_ptr0 + (x0), tmp0)", 2),
    ("tl.atomic_add(in_out_ptr0 + (x0), tmp0)", 2)])
def test_an_argument_in_place_counts_as_it_is_used(body, passes):
    x = torch.zeros(1000)
    assert bytes_of(body, ["in_out_ptr0"], 1.0, x) == passes * x.nbytes


def test_what_inductor_counts_is_taken_where_it_is_less():
    """As of a table of which a kernel reads a few rows."""
    table, out = torch.zeros(1000), torch.zeros(10)
    body = "tl.store(out_ptr0 + (x0), tl.load(in_ptr0 + (tmp0)))"
    assert bytes_of(body, ["in_ptr0", "out_ptr0"], 80e-9, table, out) == pytest.approx(80)
    assert bytes_of(body, ["in_ptr0", "out_ptr0"], 1.0, table, out) == table.nbytes + out.nbytes


def test_rows_of_a_table_count_and_not_the_table():
    """Where rows are put into it, those that it has are read and written, as large as new ones."""
    notes = Notes()
    notes.phase = "update of 0 on 1"
    table, ids, rows = torch.zeros(1000, 4), torch.arange(5), torch.ones(5, 4)
    few, places = torch.zeros(2, 4), torch.tensor([0, 1, 0, 1, 0])
    with Recorder(notes):
        table[ids]
        table[ids] = rows
        table.index_add_(0, ids, rows)
        few.index_add_(0, places, rows)  # here all of it is less
    of_rows = ids.nbytes + 3 * rows.nbytes
    of_few = ids.nbytes + rows.nbytes + 2 * few.nbytes
    gathered = ids.nbytes + 2 * rows.nbytes
    assert [x["bytes"] for x in notes.launches] == [gathered, of_rows, of_rows, of_few]


def launch(phase="pass of 0", kind="aten", name="aten.mm.out", num_bytes=0.0, flop=0.0):
    return dict(phase=phase, kind=kind, name=name, bytes=num_bytes, flop=flop, tensors=[])


def test_exact_sums_and_tiny_kernels_take_longer():
    def ms(**fields):
        return cost.milliseconds(launch(**fields), RATES)

    fast = "aten._scaled_mm.out"
    assert ms(name=fast, flop=2e9) == pytest.approx(1)
    assert ms(name=fast + EXACT_SUMS, flop=2e9) == pytest.approx(cost.SLOW_SUMS)
    assert ms(num_bytes=1e6) == pytest.approx(1)
    assert ms(num_bytes=8) == 1000 * cost.FLOOR
    assert ms(kind="wire", phase="update of 0 on 8", num_bytes=8e6) == pytest.approx(7)


def test_products_in_fp32_qr_and_attention_have_their_own_rates():
    def ms(dtype, **fields):
        return cost.milliseconds(launch(**fields) | dict(tensors=[[dtype, [8, 8]]]), RATES)

    assert ms("bfloat16", flop=1e9) == pytest.approx(1)
    assert ms("float32", flop=1e9) == pytest.approx(10)
    assert ms("float32", name="aten.linalg_qr.default", flop=1e9) == pytest.approx(100)
    attend = "aten._scaled_dot_product_flash_attention.default"  # half of it is masked
    assert ms("bfloat16", name=attend, flop=2e9) == pytest.approx(1)


def test_qr_counts_the_products_of_householders_way():
    """4/3 n³ for the reflections, and as many for their product."""
    notes = Notes()
    notes.phase = "update of 0 on 1"
    with Recorder(notes):
        torch.linalg.qr(torch.eye(6).expand(2, 6, 6))
    assert sum(x["flop"] for x in notes.launches) == pytest.approx(2 * 8 / 3 * 6**3)


def test_all_stages_count_by_their_steps_and_averages_by_theirs():
    stage = dict(tokens=128, step_tokens=1024, width=100, head_tokens=128, block_pairs=1)
    facts = dict(model_dim=64, period=2, averages={"late": 5}, stages={
        "0": stage | dict(steps=10), "1": stage | dict(steps=30)})
    launches = [launch(num_bytes=1e6), launch("pass of 1", num_bytes=3e6)]
    launches += [launch(f"update of {i} on 8", num_bytes=2e6) for i in (0, 1)]
    launches += [launch("average late on 8", num_bytes=4e6)]
    found = Trace(facts, {}, [], {}, launches, {})
    assert [each.step_ms for each in cost.price(found, RATES, 8)] == pytest.approx([2, 4])
    assert cost.run_ms(found, RATES, 8) == pytest.approx(10 * 2 + 30 * 4 + 5 * 4)


def test_memory_is_the_peak_of_all_stages():
    stage = dict(steps=1, tokens=128, step_tokens=1024, width=1, head_tokens=1, block_pairs=1)
    facts = dict(model_dim=64, period=2, averages={}, head_chunks=1,
                 stages={"0": stage, "1": stage, "2": stage})
    gib = {"state": 1, "pass of 0": 2, "pass of 1": 9, "pass of 2": 3, "validation": 4}
    sizes = {name: size * 2**30 for name, size in gib.items()}
    found = bench.modelled(Trace(facts, {}, [], sizes, [], {}))
    assert found["gib"] == dict(training=9, validation=4, state=1)


@pytest.mark.slow
def test_the_pages_have_the_tables_of_the_kept_numbers():
    for path in gpu_tables.PAGES:
        page = path.read_text()
        assert gpu_tables.filled(page) == page
        marks = page.count("<!-- bench: begin")
        assert marks == page.count("<!-- bench: end") > (5 if path == gpu_tables.PAGE else 0)


def test_each_kept_run_has_all_of_its_stages():
    for name, found in json.loads(gpu_tables.KEPT.read_text()).items():
        script = load_script(REPO / found["script"])
        cfg = script.parse_args(found["flags"])
        assert sum(each["steps"] for each in found["stages"]) == cfg.num_iterations, name
