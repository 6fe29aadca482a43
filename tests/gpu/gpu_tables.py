"""The tables of docs/gpus.md, and sentences of records' pages, from modelled.json:
`python tests/bench.py tables --write`.

A table stands between `<!-- bench: begin NAME -->` and `<!-- bench: end NAME -->`.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import machine
import plan
import torch
from shards import load_script

REPO = Path(__file__).resolve().parents[2]
OPTIMIZERS = REPO / "records" / "optimizers"
PAGE = REPO / "docs" / "gpus.md"
PAGES = (PAGE, OPTIMIZERS / "2026-06-11_o36_MuonTuned" / "README.md",
         OPTIMIZERS / "2026-06-19_o46_CautiousDecay" / "README.md")
KEPT = Path(__file__).with_name("modelled.json")

# ms of a step, by stage, on eight H100s: #53's log, and the mean of two logs of #92
PUBLISHED_STAGES = {"53": (34.4, 62.4, 88.6), "92j": (17.0, 30.3, 45.0, 47.9, 46.6, 22.6)}
PUBLISHED_MINUTES = {"53": 1.988, "92g": 0.665, "92h": 0.665, "92i": 0.665, "92j": 0.665}
NAMES = {
    "53": "#53 MultiTokenPrediction", "92g": "#92 NgramTable", "92h": "92h Fp8Products",
    "92i": "92i ValueRows", "92j": "92j Bf16Wire"}
ABLATIONS = (  # seconds of a run by #92's author, and the scripts without and with it here
    ("sampled softmax", 8.80, "92e", "92f"), ("FP8 in MLP and attention", 5.02, "92g", "92h"),
    ("n-gram table", 1.19, "92f", "92g"), ("value tables by rows", 1.05, "92h", "92i"),
    ("mix of ten sources", -0.51, "92a", "92b"), ("ANVIL's rule", -0.47, "92b", "92c"))
CARDS = (  # GB, an example of the card, its name in RATES
    (8, "RTX 4060", "rtx4060"), (12, "RTX 4070", "rtx4070"), (16, "RTX 4060 Ti", "rtx4060ti"),
    (24, "RTX 4090", "rtx4090"), (40, "A100", "a100"), (80, "H100", "h100"))
# The ladder by steps: GB of a card, its name, and that in RATES
CARDS_BY_STEPS = ((24, "RTX 4090", "rtx4090"), (40, "A100", "a100"), (80, "H100", "h100"))
BY_STEPS = {"o36": "o36 MuonTuned", "o46": "o46 CautiousDecay"}
SIZES_BY_STEPS = 8, 12, 16, 24, 32, 40  # GB of cards
PUBLISHED_BY_STEPS = (  # ms of a step by the logs of public results; modelled: of what, on what
    ("#36", "8 H100", 154, "o36", "8 h100", 1), ("#44", "8 H100", 327, "o46", "8 h100", 1),
    ("#45", "1 GH200", 2215, "o46", "1 gh200", 1), ("#46", "2 A40", 3682, "o46", "1 a40", 2))
GPUS = {  # what `planned` has: how many, GiB of each that CUDA reports, and whether they have FP8
    "8 GB": (1, 7.7, True),
    "12 GB": (1, 11.6, True),
    "16 GB": (1, 15.6, True),
    "24 GB, no FP8": (1, 23.5, False),
    "24 GB": (1, 23.5, True),
    "32 GB": (1, 31.4, True),
    "48 GB": (1, 47.4, True),
    "80 GB, no FP8": (1, 79.1, False),
    "80 GB": (1, 79.1, True),
    "8 × 80 GB": (8, 79.1, True),
}
# Records whose memory differs much
PLANNED = (
    ("2025-12-22_MultiTokenPrediction", ""), ("2026-01-19_BigramTable", ""),
    ("2026-07-13_PrefixTargets", ""), ("2026-08-30_92f_SampledSoftmax", ""),
    ("2026-08-30_92h_Fp8Products", ""), ("2026-08-30_92h_Fp8Products", "--ngram_rows 377280"))


def table(header: str, rows) -> str:
    """A table of Markdown; the header and the rows have their cells."""
    cells = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in cells)


def stages(kept) -> str:
    """Modelled steps beside those of the public logs. 92j has the most of #92's system work."""
    rows = []
    for name, published in PUBLISHED_STAGES.items():
        title = NAMES[name].split()[0]
        for index, (row, ms) in enumerate(zip(kept[name]["stages"], published, strict=True)):
            rows.append([title, index, f"{row['tokens']:,}", f"{row['step_ms']:.0f}",
                         f"{ms:.0f}", f"{row['step_ms'] / ms:.2f}"])
    return table(["Record", "Stage", "Tokens a GPU", "Modelled, ms a step", "Published", "Ratio"],
                 rows)


def ablations(kept) -> str:
    rows = []
    for name, published, without, with_it in ABLATIONS:
        gain = 60 * (kept[without]["minutes"]["8 h100"] - kept[with_it]["minutes"]["8 h100"])
        rows.append([name, seconds(published), seconds(gain)])
    rows.append(["averages", seconds(0.52), seconds(-kept["92h"]["averages_ms"] / 1000)])
    return table(["Part of #92", "Seconds saved, according to its author", "Modelled"], rows)


def seconds(number: float) -> str:
    return f"{number:.1f}".replace("-0.0", "0.0").replace("-", "−")


def records(kept) -> str:
    rows = []
    for name, title in NAMES.items():
        steps = sum(each["steps"] for each in kept[name]["stages"])
        minutes = kept[name]["minutes"]["8 h100"]
        published = PUBLISHED_MINUTES[name]
        digits = 2 if minutes < 1 else 1
        rows.append([title, f"{minutes:.{digits}f}", published, f"{minutes / published:.1f}",
                     f"{steps:,}", f"{60_000 * minutes / steps:.0f}"])
    return table(["Record", "Minutes, modelled", "Published", "Ratio", "Steps", "ms a step"], rows)


def groups(kept) -> str:
    """Of a mean step of #92, 92h and 92j on eight H100s."""
    columns = []
    names = "92g", "92h", "92j"
    for name in names:
        total, steps = {}, sum(each["steps"] for each in kept[name]["stages"])
        for each in kept[name]["stages"]:
            parts = each["groups"] | dict(optimizers=each["update_ms"], wire=each["wire_ms"])
            for group, ms in parts.items():
                total[group] = total.get(group, 0) + each["steps"] * ms / steps
        columns.append(total)
    rows = [[group, *(f"{column.get(group, 0):.1f}" for column in columns)]
            for group in sorted(columns[0], key=columns[0].get, reverse=True)]
    rows.append(["sum", *(f"{sum(column.values()):.0f}" for column in columns)])
    return table(["Milliseconds of a mean step", *(NAMES[name].split()[0] for name in names)], rows)


def cards(kept) -> str:
    """The root on one GPU. A run with longer sequences takes less than one with shorter ones."""
    script = load_script(REPO / "train_gpt.py")
    of_flags = {" ".join(x["flags"]): x for x in kept.values() if x["script"] == "train_gpt.py"}
    rows = []
    for gigabytes, example, card in CARDS:
        free = int(0.98 * gigabytes * 2**30)  # programs get a little less than a card has
        flags = " ".join(flags_that_fit(script, script.parse_args([]), free, 1))
        minutes = of_flags.get(flags, kept["53"])["minutes"][f"1 {card}"]
        time = f"{minutes / 60:.1f} hours" if minutes > 90 else f"{minutes:.0f} minutes"
        rows.append([f"{gigabytes} GB", example, f"`{flags}`" if flags else "none",
                     time if flags in of_flags else f"over {time}"])
    return table(["Card", "For example", "Flags of `train_gpt.py`", "Time, modelled"], rows)


def flags_that_fit(script, cfg, memory: int, gpus: int, fp8: bool = True) -> list[str]:
    """Flags of data/plan.py for GPUs that are not there."""
    of_memory = mock.Mock(return_value=SimpleNamespace(total_memory=memory))
    with mock.patch("torch.cuda.get_device_properties", of_memory):
        chunks = cfg.head_chunks or script.default_head_chunks(torch.device("cuda"))
    return plan.flags_that_fit(script, replace(cfg, head_chunks=chunks), memory, gpus, fp8)


def cell_of(script, cfg, gpus: int, gib: float, fp8: bool) -> str:
    """How a record fits a card: the part of its sequences, or "–"."""
    try:
        flags = flags_that_fit(script, cfg, int(gib * 2**30), gpus, fp8)
    except machine.MachineError:
        return "–"
    return f"1/{flags[flags.index('--shorten') + 1]}" if "--shorten" in flags else "whole"


def fits(rows, gpus: dict) -> str:
    """Records, each with flags, against GPUs, with the shards that each reads."""
    cells = []
    for record, flags in rows:
        script = load_script(REPO / "records" / record / "train_gpt.py")
        cfg = script.parse_args(flags.split())
        shards = max(plan.FEWEST_SHARDS, plan.count_shards(script, cfg))
        name = record.partition("_")[2]  # without the date
        cells.append([f"{name} {flags}".strip(), shards,
                      *(cell_of(script, cfg, *each) for each in gpus.values())])
    return table(["Record", "Shards", *gpus], cells)


def planned(kept) -> str:
    """How records whose memory differs much fit cards."""
    return fits(PLANNED, {name: each for name, each in GPUS.items() if each[2]})


def all_planned() -> str:
    """How all records fit cards."""
    folders = [path.parent.relative_to(REPO / "records")
               for pattern in ("20*", "optimizers/20*")
               for path in sorted((REPO / "records").glob(f"{pattern}/train_gpt.py"))]
    return fits([(str(folder), "") for folder in folders], GPUS)


def ms_of_step(found, gpus: str) -> float:
    steps = sum(each["steps"] for each in found["stages"])
    return 60_000 * found["minutes"][gpus] / steps


def by_steps(kept) -> str:
    """Records of the ladder by steps on one GPU."""
    rows = []
    for name, title in BY_STEPS.items():
        for gigabytes, card, of_rates in CARDS_BY_STEPS:
            ms = ms_of_step(kept[name], f"1 {of_rates}")
            hours = kept[name]["minutes"][f"1 {of_rates}"] / 60
            steps = sum(each["steps"] for each in kept[name]["stages"])
            rows.append([title, f"{card}, {gigabytes} GB", rows_that_fit(kept[name], gigabytes),
                         f"{ms / 1000:.1f}", f"{steps:,}", f"{hours:.1f}"])
    return table(["Record", "GPU", "Sequences a pass", "Seconds a step, modelled", "Steps",
                  "Hours for all, modelled"], rows)


def rows_that_fit(found, gigabytes) -> int | str:
    """Sequences that data/plan.py gives a pass on a card; "–" where it is too small."""
    script = load_script(REPO / found["script"])
    free = int(0.98 * gigabytes * 2**30)  # programs get a little less than a card has
    try:
        flags = flags_that_fit(script, script.parse_args([]), free, 1)
    except machine.MachineError:
        return "–"
    return script.parse_args(flags).sequences_per_forward


def o36(kept) -> str:
    return on_one_gpu(kept["o36"])


def o46(kept) -> str:
    return on_one_gpu(kept["o46"])


def on_one_gpu(found) -> str:
    """What a record's page says of a run by steps."""
    hours = [f"{found['minutes'][f'1 {of_rates}'] / 60:.1f} hours on one {card}"
             for _, card, of_rates in reversed(CARDS_BY_STEPS)]
    return (f"A whole run takes {hours[0]}, {hours[1]}, {hours[2]} (modelled, not measured).\n"
            f"It takes {found['gib']['training']:.0f} GiB with passes of 64 sequences, of which "
            f"{found['gib']['state']:.1f} are weights, gradients and state.")


def planned_by_steps(kept) -> str:
    """Sequences of a pass on cards of all sizes, and GiB of a pass of as many as there may be."""
    rows = [[title, *(rows_that_fit(kept[name], gigabytes) for gigabytes in SIZES_BY_STEPS),
             f"{kept[name]['gib']['training']:.1f}", f"{kept[name]['gib']['state']:.1f}"]
            for name, title in BY_STEPS.items()]
    return table(["Record", *(f"{gigabytes} GB" for gigabytes in SIZES_BY_STEPS),
                  "GiB with 64 a pass", "of which state"], rows)


def published_by_steps(kept) -> str:
    rows = []
    for result, gpus, published, name, on, share in PUBLISHED_BY_STEPS:
        ms = ms_of_step(kept[name], on) / share
        rows.append([result, gpus, f"{published:,}", name, f"{ms:,.0f}", f"{ms / published:.2f}"])
    return table(["Result", "GPUs", "Published, ms a step", "Modelled", "ms a step", "Ratio"], rows)


def memory(kept) -> str:
    """What data/plan.py plans by, of the records that `planned` has."""
    rows = []
    for record in dict(PLANNED):
        gib = next(gib for prefix, gib in plan.MEMORY.items() if record.startswith(prefix))
        rows.append([record.partition("_")[2], *(f"{each:.1f}" for each in gib)])
    return table(["Record", "Training, GiB", "Validation", "State"], rows)


def filled(page: str) -> str:
    """The page with all of its tables made anew."""
    kept = json.loads(KEPT.read_text())
    makers = {each.__name__: each for each in (
        stages, ablations, records, groups, cards, planned, memory, by_steps, planned_by_steps,
        published_by_steps, o36, o46)}

    def made(found):
        return f"{found[1]}\n{makers[found[2]](kept)}\n{found[3]}"

    marks = r"(<!-- bench: begin (\w+) -->).*?(<!-- bench: end \2 -->)"
    return re.sub(marks, made, page, flags=re.DOTALL)
