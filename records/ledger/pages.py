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
# The newest public record and its minutes, by the table of github.com/KellerJordan/modded-nanogpt
# as it stood on 2026-08-01 (commit f411b3d3).
NEWEST, NEWEST_MONTH, NEWEST_MINUTES = 89, "July 2026", 1.23
GREY = "#8a9299"
CONTEST = (
    ("Contestant", "Loss ± std (n)", "Target", "Difference", "Shown from", "Time"),
    "{label}|{loss}|{p_target:.1g}|{difference}|{against[smallest_shown]:.2g}|" + RATIO, """
Target: p of a one-sided t-test that the mean lies below target_loss. Difference: from the parent's
mean, or else the first contestant's, with the p of a two-sided t-test, paired by seed; * where
p < 0.01. Shown from: the smallest difference that would reach that. Time: median
and range of the ratios by seed, which only runs alone on the machine (--jobs 1) measure.""")
TIMES = (
    ("Record", "Last loss ± std (n)", "Reached", "Step", "Tokens", "Seconds"),
    "{name}|{loss}|{reached} of {n}|{step:,g}|{tokens:,.0f}|{seconds:.2f}", """
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
    cells = [heading]
    for row in rows:
        cells.append(cells_of(row, forms))
    widths = [max(map(len, column)) for column in zip(*cells)]
    cells.insert(1, ["-" * width for width in widths])
    lines = []
    for row in cells:
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
    flags = {"preset": preset}
    ours = table.settings_of(record.folder / "train_gpt.py", flags)
    theirs = table.settings_of(record.parent.folder / "train_gpt.py", flags)
    for name, value in ours.items():
        counts = name.endswith("_lr") or name.startswith("val_")
        if counts and value != theirs.get(name, value):
            return True
    return False


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
        row = {"record": record.folder.name, "name": name_of(record), "measured": measured}
        rows.append(row | record.claim)
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
        parts = [
            linked(rows, "../", *LADDER),
            *evidence([record], "../", with_parents=True),
            "[What the columns and marks mean](../README.md).",
            shards_words(record)]
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


def points_of(log: Log, losses: dict) -> np.ndarray:
    """Rows of (loss, step, tokens, seconds), with NaN for what the log does not tell."""
    rows = []
    for step, (loss, ms) in sorted(losses.items()):
        rows.append((loss, step, log.tokens_until(step), ms and ms / 1000))
    return np.array(rows, float).reshape(-1, 4)


def time_to_loss(name: str, logs: list, target: float):
    """When runs first validated at or below a loss, in the median."""
    reached = []
    for log in logs:
        points = points_of(log, log.val)
        reached += [*points[points[:, 0] <= target][:1]]
    found = {"name": name, "target": target, "losses": [log.val_loss for log in logs],
             "n": len(logs), "reached": len(reached)}
    medians = np.median(reached, axis=0) if reached else [math.nan] * 4
    for key, value in zip(("step", "tokens", "seconds"), medians[1:]):
        found[key] = None if math.isnan(value) else float(value)
    return found


def curve_of(log: Log) -> np.ndarray:
    """The points of a run's validations; of its training, in 50 pieces, if it has but one."""
    points, train = points_of(log, log.val), points_of(log, log.train)
    if len(points) > 1 or not len(train):
        return points[points[:, 1] > 0]
    size = max(1, len(train) // 50)
    pieces = train[:len(train) // size * size].reshape(-1, size, 4)
    ends = pieces[:, -1]
    ends[:, 0] = pieces[:, :, 0].mean(axis=1)
    return np.concatenate([ends, points])


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


def ladder_figure(records: list, width: float = 9):
    """Published minutes of each record, and of the newest public one in grey."""
    rows, numbers = [], set()
    for record in records:
        if published := record.claim["published"]:
            rows.append((name_of(record), published["minutes"], "C0"))
            numbers.add(published["number"])
    if NEWEST not in numbers:
        rows.append((f"#{NEWEST} ({NEWEST_MONTH})", NEWEST_MINUTES, GREY))
    figure, (axis,) = picture(1, 0.36 * len(rows) + 1.1, width)
    for y, (_, minutes, color) in enumerate(rows):
        axis.plot(minutes, y, "o", color=color, markersize=8)
        axis.text(minutes * 1.06, y, f"{minutes:g}", va="center")
    axis.set(xscale="log", xlim=(1.1, 22), xlabel="published minutes on 8×H100 (logarithmic)")
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_yticks(range(len(rows)), [name for name, *_ in rows])
    axis.set_xticks([1.5, 2, 3, 5, 10, 20])
    axis.xaxis.set_major_formatter("{x:g}")
    axis.minorticks_off()
    return figure


def curves_figure(curves: dict, target: float, panels=PANELS, width: float = 9):
    """Losses of runs, by name: arrays of (loss, step, and what other panels need)."""
    from matplotlib.ticker import EngFormatter

    figure, axes = picture(len(panels), 4.5, width)
    losses = [target]
    for index, (name, runs) in enumerate(curves.items()):
        for run in runs:
            loss, *columns = run.T
            losses += [*loss[len(loss) // 10:]]  # the first are of the untrained model
            for axis, column in zip(axes, columns):
                axis.plot(column, loss, "-o", color=f"C{index}", alpha=0.4 + 0.6 / len(runs),
                          markevery=[-1], label=name if run is runs[0] else None)
    low, high = min(losses), max(losses)
    margin = max(high - low, 0.01) * 0.06
    for axis, panel in zip(axes, panels):
        axis.axhline(target, color=GREY, linestyle=(0, (2, 2)))
        axis.set(xlabel=panel, ylim=(low - margin, high + margin))
        axis.locator_params(axis="x", nbins=5)
        axis.xaxis.set_major_formatter(EngFormatter())  # 400 k
    axes[0].set_ylabel("loss (nats per token; point: validation)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure
