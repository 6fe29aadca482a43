"""The tables of docs/gpus.md, from modelled.json. `python tests/bench.py tables --write` writes them.

A table stands between `<!-- bench: begin NAME -->` and `<!-- bench: end NAME -->`.
"""

import json
import re
from pathlib import Path

import machine
import plan
from shards import load_script

REPO = Path(__file__).resolve().parents[2]
PAGE = REPO / "docs" / "gpus.md"
RECORDS = REPO / "records" / "README.md"
KEPT = Path(__file__).with_name("modelled.json")

# ms of a step, by stage: two public logs of #92, each of eight H100s
PUBLISHED_STAGES = (17.0, 30.3, 45.0, 47.9, 46.6, 22.6)
PUBLISHED_MINUTES = {"53": 1.988, "62": 1.655, "88": 1.243, "92g": 0.665}
NAMES = {"53": "#53 MultiTokenPrediction", "62": "#62 BigramTable", "88": "#88 PrefixTargets",
         "92a": "92a MlpsByLayer", "92b": "92b DenseMix", "92c": "92c AnvilMuon",
         "92e": "92e AverageWeights", "92f": "92f SampledSoftmax", "92g": "#92 NgramTable",
         "92h": "92h Fp8Products"}
ABLATIONS = (  # seconds of a run by #92's author, and the scripts without and with it here
    ("sampled softmax", 8.80, "92e", "92f"), ("FP8 in MLP and attention", 5.02, "92g", "92h"),
    ("n-gram table", -1.19, "92f", "92g"), ("mix of ten sources", -0.51, "92a", "92b"),
    ("ANVIL's rule", -0.47, "92b", "92c"))
CARDS = (  # GB, for example, of RATES; the kept numbers of a run of the root with the card's flags
    (8, "RTX 4060", "rtx4060", "53-8"), (12, "RTX 4070", "rtx4070", "53-4"),
    (16, "RTX 4060 Ti", "rtx4060ti", "53-2"), (24, "RTX 4090", "rtx4090", "53-chunks8"),
    (40, "A100", "a100", "53-chunks8"), (80, "H100", "h100", "53"))
# Records whose memory differs much
PLANNED = ("2025-09-10_Yarn", "2025-12-22_MultiTokenPrediction", "2026-01-19_BigramTable",
           "2026-07-13_PrefixTargets", "2026-08-30_92f_SampledSoftmax",
           "2026-08-30_92h_Fp8Products")


def table(header: str, rows) -> str:
    """A table of Markdown; the header and the rows have their cells."""
    cells = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in cells)


def stages(kept) -> str:
    """92h's, beside what #92's logs say."""
    found = kept["92h"]["stages"]
    rows = [
        ["steps", *(each["steps"] for each in found)],
        ["tokens a GPU", *(f"{each['tokens']:,}" for each in found)],
        ["published, ms a step", *(f"{ms:.1f}" for ms in PUBLISHED_STAGES)],
        ["92h, modelled", *(f"{each['step_ms']:.0f}" for each in found)],
        ["quotient", *(f"{each['step_ms'] / ms:.2f}"
                       for each, ms in zip(found, PUBLISHED_STAGES, strict=True))]]
    return table(["Stage", *range(len(found))], rows)


def ablations(kept) -> str:
    rows = []
    for name, published, without, with_it in ABLATIONS:
        if {without, with_it} <= kept.keys():
            gain = 60 * (kept[without]["minutes"]["8 h100"] - kept[with_it]["minutes"]["8 h100"])
            rows.append([name, f"{published:.1f}", f"{gain:.1f}"])
    rows.append(["averages", "-0.5", f"{-kept['92h']['averages_ms'] / 1000:.1f}"])
    return table(["Part of #92", "Seconds it saves, its author", "Here, modelled"], rows)


def records(kept) -> str:
    rows = []
    for name, title in NAMES.items():
        if name not in kept:
            continue
        steps = sum(each["steps"] for each in kept[name]["stages"])
        minutes = kept[name]["minutes"]["8 h100"]
        published = PUBLISHED_MINUTES.get(name)
        rows.append([title, f"{steps:,}", f"{60_000 * minutes / steps:.0f}", f"{minutes:.2g}"
                     if minutes < 1 else f"{minutes:.1f}", published or "–",
                     f"{minutes / published:.1f}" if published else "–"])
    return table(["Record", "Steps", "ms a step", "Minutes", "Published", "Quotient"], rows)


def groups(kept) -> str:
    """Of a mean step of #92 and of 92h on eight H100s."""
    columns = []
    for name in "92g", "92h":
        total, steps = {}, sum(each["steps"] for each in kept[name]["stages"])
        for each in kept[name]["stages"]:
            parts = each["groups"] | dict(optimizers=each["update_ms"], wire=each["wire_ms"])
            for group, ms in parts.items():
                total[group] = total.get(group, 0) + each["steps"] * ms / steps
        columns.append(total)
    rows = [[group, *(f"{column.get(group, 0):.1f}" for column in columns)]
            for group in sorted(columns[0], key=columns[0].get, reverse=True)]
    rows.append(["sum", *(f"{sum(column.values()):.0f}" for column in columns)])
    return table(["Milliseconds of a mean step", "#92", "92h"], rows)


def cards(kept) -> str:
    rows = []
    for size, example, card, name in CARDS:
        minutes = kept[name]["minutes"][f"1 {card}"]
        time = f"{minutes / 60:.1f} hours" if minutes > 90 else f"{minutes:.0f} minutes"
        flags = " ".join(word for word in kept[name]["flags"])
        gib = max(kept[name]["gib"].values())
        rows.append([f"{size} GB", example, f"`{flags}`" if "shorten" in flags else "none",
                     f"{gib:.1f} GiB", time])
    return table(["Card", "For example", "Flags of `train_gpt.py`", "Memory, counted",
                  "One card, modelled"], rows)


def chunks(kept) -> str:
    found = {kept[name]["head_chunks"]: kept[name]["gib"]["training"]
             for name in ("53", "53-chunks8")}
    return table(["`--head_chunks`", *found],
                 [["GiB at the peak, counted", *(f"{gib:.1f}" for gib in found.values())]])


def planned(kept) -> str:
    """What data/plan.py chooses for each record and memory, on one GPU."""
    sizes = [size for size, *_ in CARDS]
    rows = []
    for record in PLANNED:
        script = load_script(REPO / "records" / record / "train_gpt.py")
        row = [record.partition("_")[2]]
        for size in sizes:
            try:
                # What is left of so many GB for programs
                flags = plan.flags_that_fit(script, script.parse_args([]), int(0.98 * size * 2**30),
                                            1)
            except machine.MachineError:
                flags = "too small"
            row.append(f"`{flags}`" if flags.startswith("--") else flags or "as it is")
        rows.append(row)
    return table(["Record", *(f"{size} GB" for size in sizes)], rows)


def memory(kept) -> str:
    """What data/plan.py plans by."""
    titles = re.findall(r"^\| \[(#?\w+ \w+)\]\((\S+)\)", RECORDS.read_text(), re.MULTILINE)
    rows = []
    for prefix, gib in plan.MEMORY.items():
        title, folder = [each for each in titles if each[1].startswith(prefix)][-1]
        cfg = load_script(REPO / "records" / folder / "train_gpt.py").Hyperparameters()
        longest = max(row.seq_len for row in cfg.rows())
        rows.append([title, f"{cfg.sequences_per_forward * longest:,}",
                     *(f"{each:.1f}" for each in gib)])
    return table(["Record", "Tokens of a pass", "Training, GiB", "Validation", "State"], rows)


def filled(page: str) -> str:
    """The page with all of its tables made anew."""
    kept = json.loads(KEPT.read_text())
    makers = {each.__name__: each for each in (
        stages, ablations, records, groups, cards, chunks, planned, memory)}

    def made(found):
        return f"{found[1]}\n{makers[found[2]](kept)}\n{found[3]}"

    marks = r"(<!-- bench: begin (\w+) -->).*?(<!-- bench: end \2 -->)"
    return re.sub(marks, made, page, flags=re.DOTALL)
