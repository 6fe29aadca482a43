"""What is shown: tables, the generated blocks of the READMEs, the ladder and the curves."""

import math
import re
import statistics
import sys
from pathlib import Path

import numpy as np
from ledger import table
from ledger.diff import diff_sources
from ledger.logs import LedgerError, Log, read_text, sha256
from ledger.public import DATED, TARGET, Group
from ledger.table import Record

BLOCK = ("<!-- ledger: begin -->", "<!-- ledger: end -->")  # around a README's generated lines
PANELS = ("steps", "training tokens", "training time (s)")
MACHINE = ("Preset {preset} on {device}, {world_size} rank(s), torch {torch}, {threads} thread(s) "
           "a run, {jobs} run(s) at once")
RATIO = "×{against[time]:.3f} ({against[fastest]:.3f}–{against[slowest]:.3f})"
SHARD = 100_000_000  # tokens of a training shard of FineWeb
FETCHED = 8  # shards that data/fineweb.py fetches
# A table: its heading, the forms of its cells, and what it says below.
LADDER = (
    ("Record", "Minutes", "Loss (n)", "Float64"),
    "{name}|{published[minutes]:g}|{published[val_loss]:.4f} ({published[n]})|"
    "{equality[largest]:.0e}", """
Minutes, Loss: of the public record's n runs on 8×H100, by its own files. Float64: the largest
difference of our script from the public one.""")
RUNS = (
    ("Record", "Loss ± std (n)", "Target", "Minutes", "Difference", "Time"),
    "{name}|{loss}|{p_target:.1g}|{minutes:.3f}|{difference}|" + RATIO, """
Loss: all runs of a setting. Target: p that the mean lies below the rules' target. Difference: from
the parent's mean in the same setting, with the two-sided p of the paired t-test; * where p < 0.01.
†: the record also changes this preset's rates or its validation, so the difference is not the
idea's alone. Minutes (median), Time (ratio to the parent's): of runs alone on their machine.""")
FRONT = (
    ("Record", "Idea", "Published (min)", "Changed lines"),
    "{name}|{change}|{published[minutes]:g}|{lines}")
FOREIGN = (
    ("Folder", "Runs", "Loss ± std (n)", "p", "Steps", "Minutes"),
    "{folder:.44}|{runs:.44}|{loss}|{p_target:.1g}|{steps:,}|{minutes:.3f}", """
p: one-sided t-test that the mean lies below 3.28. Runs: the record's, or what they are beside it; a
baseline is what has the source of the older folder that is named, or is called one.""")
# Minutes of the public records from #54 on, by the table of github.com/KellerJordan/modded-nanogpt
# as it stood on 2026-08-01 (commit f411b3d3).
NEWER = dict(enumerate(map(float, """
    1.940 1.918 1.894 1.878 1.820 1.781 1.765 1.748 1.655 1.650 1.630 1.613 1.595 1.540 1.535 1.528
    1.521 1.516 1.496 1.485 1.468 1.453 1.446 1.435 1.426 1.411 1.406 1.363 1.353 1.328 1.320 1.271
    1.266 1.256 1.243 1.23""".split()), 54))
NEWEST_MONTH = "July 2026"
GREY = "#8a9299"
RESULTS = ("Contestant", "Loss ± std (n)", "Target", "Difference", "Shown from", "Time")
CONTEST = (
    RESULTS,
    "{label}|{loss}|{p_target:.1g}|{difference}|{against[smallest_shown]:.2g}|" + RATIO, """
Target: p of a one-sided t-test that the mean lies below target_loss. Difference: from the parent's
mean, or else the first contestant's, with the p of a two-sided t-test, paired by seed; * where
p < 0.01. Shown from: the smallest difference that would reach that. Time: median
and range of the ratios by seed, which only runs alone on the machine (--jobs 1) measure.""")
TIMES = (
    ("Record", "Last loss ± std (n)", "Reached", "Step", "Tokens", "Seconds"),
    "{name}|{loss}|{reached} of {n}|{step:,}|{tokens:,.0f}|{seconds:.2f}", """
Reached: runs with a validation at or below the loss {:g}. Step, Tokens, Seconds: of the first one,
the median of these runs.""")


def cells_of(row: dict, forms: str):
    """Forms, with | between them, filled from a row; empty where a number is None."""
    cells, words, losses = [], "", row.get("losses")
    if losses:
        spread = f" ± {statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
        words = f"{statistics.fmean(losses):.4f}{spread} ({len(losses)})"
    for form in forms.split("|"):
        try:
            cell = form.format(loss=words, difference=difference_of(row), **row)
        except TypeError:
            cell = ""
        cells.append(cell.replace("-", "−") if "g}" in form else cell)
    return cells


def difference_of(row: dict) -> str:
    """From the parent's mean; without a p where there is but one pair."""
    against = row.get("against")
    if not against:
        return ""
    words = f"{against['difference']:+.4f}"
    if against["p"] is not None:
        words += f" (p {against['p']:.2g}){against['shown']}"
    words += row.get("retuned", "")
    return words.replace("-", "−")


def text_table(rows: list, heading: tuple, forms: str, legend: str) -> str:
    cells, lines = [heading, *(cells_of(row, forms) for row in rows)], []
    widths = [max(map(len, column)) for column in zip(*cells)]
    for row in (heading, ["-" * width for width in widths], *cells[1:]):
        lines.append("  ".join(map(str.ljust, row, widths)).rstrip())
    return "\n".join([*lines, legend])


def markdown(heading: tuple, rows: list) -> str:
    lines = []
    for row in (heading, ["---"] * len(heading), *rows):
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def name_of(record: Record) -> str:
    name = record.folder.name.partition("_")[2]
    if record.claim["published"]:
        name = f"#{record.claim['published']['number']} {name}"
    return name


def is_retuned(record: Record, preset: str) -> bool:
    """Whether a preset's rates, or its validation, differ from those of the record's parent."""
    ours, theirs = (table.settings_of(one.folder / "train_gpt.py", {"preset": preset})
                    for one in (record, record.parent))
    names = [name for name in ours if name.endswith("_lr") or name.startswith("val_")]
    return any(ours[name] != theirs.get(name, ours[name]) for name in names)


def measure_row(record: Record, runs: list, others: list):
    """What runs of one setting give, against the parent's there."""
    losses = [float(run["val_loss"]) for run in runs]
    times = [float(run["train_time_ms"]) for run in runs if run["jobs"] == "1"]
    target = table.RULES.get(runs[0]["preset"], {}).get("target_loss", TARGET)
    return {
        "name": name_of(record),
        "folder": record.folder.name,
        "setting": dict(zip(table.SETTING, table.setting_of(runs[0]))),
        "losses": losses,
        "p_target": table.p_below(losses, float(target)),
        "minutes": median(times, 60_000),
        "against": table.compare(runs, others),
        "retuned": "†" if others and is_retuned(record, runs[0]["preset"]) else "",
    }


def ladder_rows(records: list):
    """Each record's claim and what its runs give, by setting."""
    rows = []
    for record in records:
        measured = [measure_row(record, *runs) for runs in record.measured().values()]
        rows.append({"record": record.folder.name, "name": name_of(record), **record.claim,
                     "measured": measured})
    return rows


def settings(records: list, with_parents: bool = False):
    """(machine, rows) of each setting in which records were run, what counts most first."""
    found = {}
    for record in records:
        for setting, (runs, others) in record.measured().items():
            words = MACHINE.format(**runs[0])
            if runs[0]["cuda"]:
                words += ", CUDA {cuda}, driver {driver}".format(**runs[0])
            rows = found.setdefault(setting, (words, []))[1]
            if with_parents and others:
                rows.append(measure_row(record.parent, others, []))
            rows.append(measure_row(record, runs, others))
    return [found[setting] for setting in sorted(found, key=table.rank_of)]


def ladder_text(records: list) -> str:
    """The claims, then the runs of each setting, for a terminal."""
    parts = [text_table(ladder_rows(records), *LADDER)]
    for machine, rows in settings(records):
        parts.append(f"\n{machine}:\n")
        parts.append(text_table(rows, *RUNS[:2], ""))
    return "\n".join([*parts, RUNS[2].strip()])


def linked(rows: list, above: str, heading: tuple, forms: str, *_) -> str:
    """A table for a page, from which `above` is the path to the records' folders."""
    cells = []
    for row in rows:
        name = f"[{row['name']}]({above}{row.get('record') or row['folder']})"
        cells.append(cells_of(row | {"name": name}, forms))
    return markdown(heading, cells)


def evidence(records: list, above: str, with_parents: bool):
    """Parts of a page: the runs of each setting."""
    parts = []
    for machine, rows in settings(records, with_parents):
        parts += [f"{machine}:", linked(rows, above, *RUNS)]
    return parts or ["Not measured yet."]


def shards_words(record: Record) -> str:
    """How much data a run at full size takes, where the script tells."""
    tokens = table.tokens_of(record.folder / "train_gpt.py")
    if not tokens:
        return ""
    shards = max(FETCHED, math.ceil(tokens / SHARD))
    return (f"At full size it trains on {tokens / 1e6:,.0f} million tokens. "
            f"`python data/fineweb.py {shards}` fetches enough.")


def front_rows(records: list):
    """The rows of the front page, with the number of lines that were changed."""
    rows = ladder_rows(records)
    for row, record in zip(rows, records):
        row["lines"] = ""
        if record.parent:
            changed = diff_sources(record.parent.script, record.script)
            row["lines"] = "+{added} −{removed}".format(**changed)
    return rows


def blocks(folder: Path, records: list):
    """The generated lines of each README of a folder of records, of its records and above it."""
    rules = []
    for preset, rule in table.RULES.items():
        rules.append([preset])
        for value in rule.values():
            rules[-1].append(f"`{value or 'not known here'}`")
    parts = [
        linked(ladder_rows(records), "", *LADDER),
        LADDER[2].strip(),
        *evidence(records, "", with_parents=False),
        RUNS[2].strip(),
        markdown(("preset", *table.RULES["record"]), rules)]
    path = folder / table.TABLE
    if path.exists():
        parts.append(f"[{path.name}]({path.name}), sha256 {sha256(read_text(path))}.")
    found = {folder / "README.md": "\n\n".join(parts)}
    if (folder.parent / "README.md").exists():
        rows = front_rows(records)
        found[folder.parent / "README.md"] = linked(rows, f"{folder.name}/", *FRONT)
    for record in records:
        rows = ladder_rows(filter(None, [record.parent, record]))
        parts = [linked(rows, "../", *LADDER), *evidence([record], "../", with_parents=True),
                 "[What the columns and marks mean](../README.md).", shards_words(record)]
        found[record.folder / "README.md"] = "\n\n".join(filter(None, parts))
    return found


def split_block(path: Path):
    """A README's text before, in and after its generated lines. Raises LedgerError without them."""
    begin, end = BLOCK
    match = re.fullmatch(rf"(.*{begin}\n)(.*?)({end}.*)", read_text(path), re.S)
    if not match:
        raise LedgerError(f"{path} has no lines {begin} and {end}; add them")
    return match.groups()


def foreign_row(group: Group, record: Group):
    """What a group of runs is, beside the folder's record."""
    steps = group.logs[0].planned_steps or group.logs[0].last_step
    losses = [log.val_loss for log in group.logs]
    times = [log.train_time_ms for log in group.logs]
    return {
        "folder": DATED.sub(r"\1 \2", group.folder.name),
        "runs": group.words(record),
        "ranks": group.ranks,
        "steps": steps,
        "losses": losses,
        "p_target": table.p_below(losses, TARGET),
        "minutes": median(times, 60_000),
    }


def median(values: list, unit: float = 1) -> float | None:
    """In so many units; None where a value is None."""
    if None in values or not values:
        return None
    return statistics.median(values) / unit


def time_to_loss(name: str, logs: list, target: float):
    """When runs first validated at or below a loss, in the median."""
    steps, tokens, times = [], [], []
    for log in logs:
        for step, (loss, ms) in sorted(log.val.items()):
            if loss <= target:
                steps.append(step)
                tokens.append(log.tokens_until(step))
                times.append(ms)
                break
    return {
        "name": name,
        "target": target,
        "losses": [log.val_loss for log in logs],
        "n": len(logs),
        "reached": len(steps),
        "step": int(median(steps) or 0) or None,
        "tokens": median(tokens),
        "seconds": median(times, 1000),
    }


def curve_of(log: Log) -> np.ndarray:
    """(step, loss, time) of a run's validations; of its training, in pieces, if it has but one."""
    curve = np.array([(step, *value) for step, value in sorted(log.val.items())], float)
    if len(curve) > 1:
        curve = curve[curve[:, 0] > 0]
    size = max(1, len(log.train) // 50)
    if len(curve) == 1 and log.train:
        train = np.array([(step, *value) for step, value in sorted(log.train.items())], float)
        pieces = train[:len(train) // size * size].reshape(-1, size, 3)
        ends = pieces[:, -1]
        ends[:, 1] = pieces[:, :, 1].mean(axis=1)
        curve = np.concatenate([ends, curve])
    return curve


def picture(panels: int, height: float, width: float = 9):
    import matplotlib.style
    from matplotlib.figure import Figure

    matplotlib.style.use(["tableau-colorblind10", {
        "font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
        "grid.color": "#e3e6e9", "legend.frameon": False}])
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, panels, sharey=True, squeeze=False)[0]


def save(figure, png: str):
    figure.savefig(png, format="png", dpi=200, metadata={"Software": None})
    print(f"wrote {png}", file=sys.stderr)


def draw_ladder(records: list, png: str):
    save(ladder_figure(records), png)


def ladder_figure(records: list, width: float = 9):
    """Published minutes of each record, and of newer public ones in grey, on a logarithmic axis."""
    rows = []  # (name, colour, minutes of its points)
    newer = dict(NEWER)
    for record in records:
        name = name_of(record)
        published = record.claim["published"] or {"minutes": math.nan, "number": None}
        rows.append((name, "C0", [published["minutes"]]))
        newer.pop(published["number"], None)
    if newer:
        newest = max(newer)
        others = [minutes for number, minutes in newer.items() if number != newest]
        rows.append((f"others, #{min(newer)} to #{newest - 1}", GREY, others))
        rows.append((f"#{newest} ({NEWEST_MONTH})", GREY, [newer[newest]]))
    figure, (axis,) = picture(1, 0.36 * len(rows) + 1.1, width)
    for y, (_, color, minutes) in enumerate(rows):
        axis.plot(minutes, [y] * len(minutes), "o", color=color, markersize=8, alpha=0.8)
        if len(minutes) == 1 and minutes[0] > 0:
            place = minutes[0] * 1.06
            axis.text(place, y, f"{minutes[0]:g}", va="center")
    axis.plot([], [], "oC0", label="with a script here")
    axis.plot([], [], "o", color=GREY, label="without one")
    axis.set(xscale="log", xlim=(1.1, 22), xlabel="published minutes on 8×H100 (logarithmic)")
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_yticks(range(len(rows)), [name for name, *_ in rows])
    axis.set_xticks([1.5, 2, 3, 5, 10, 20])
    axis.xaxis.set_major_formatter("{x:g}")
    axis.minorticks_off()
    axis.legend(loc="lower right")
    return figure


def draw_curves(groups: dict, target: float, png: str):
    """Loss of each run over steps, tokens and training time, where its log has them."""
    figure, axes = picture(len(PANELS), 4.5)
    from matplotlib.ticker import EngFormatter

    top = bottom = target
    missing = []
    for index, (name, logs) in enumerate(groups.items()):
        for seed, log in enumerate(logs):
            steps, losses, ms = curve_of(log).T
            tokens = np.array([log.tokens_until(step) for step in steps], float)
            for axis, panel, x in zip(axes, PANELS, (steps, tokens, ms / 1000)):
                axis.plot(x, losses, "-o", color=f"C{index}", markevery=[-1],
                          alpha=0.4 + 0.6 / len(logs), label=None if seed else name)
                if np.isnan(x[-1]) and not seed:
                    missing.append(f"{name} has no {panel}, so it is not in that panel")
            # A curve of training begins with the untrained model: what is above its tenth is cut.
            top = max(top, losses[len(losses) // 10])
            bottom = min(bottom, *losses)
    margin = max(top - bottom, 0.01) * 0.06
    for axis, panel in zip(axes, PANELS):
        axis.axhline(target, color="#4a525a", linestyle=(0, (2, 2)))
        axis.set(xlabel=panel, ylim=(bottom - margin, top + margin))
        axis.locator_params(axis="x", nbins=4)
    axes[1].xaxis.set_major_formatter(EngFormatter())
    axes[0].set_ylabel("loss (nats per token; point: validation)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    save(figure, png)
    for words in missing:
        print(words, file=sys.stderr)
