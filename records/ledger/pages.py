"""What is shown: the generated lines of the READMEs, the same for a terminal, and the ladder."""

import re
import statistics
from pathlib import Path

from ledger.logs import LedgerError, machine_words, read_text
from ledger.records import RULES, Comparison, Record, compare, is_retuned, p_below
from ledger.scripts import count_changes

LADDER = ("Record", "Public record (min), not run here", "Its loss (n)", "Float64")
LADDER_LEGEND = """\
Minutes and losses are those of the public record's n runs on 8×H100 (#91's loss: on one H100), by
its own files. Float64: the largest difference of our script from the public one."""
RUNS = ("Record", "Loss ± std (n)", "Target", "Minutes", "Difference", "Time")
RUNS_LEGEND = """\
Loss: all runs of a setting. Target: p that the mean lies below the rules' target. Difference: from
the parent's mean in the same setting, with the two-sided p of the paired t-test; * where p < 0.01;
"equal" where each seed's loss is the parent's to the digit. †: the record also changes this
preset's rates or its validation, so the difference is not the idea's alone. Minutes (median), Time
(its ratio to the parent's; the smallest and largest ratio by seed): of whole runs alone on their
machine."""
CONTEST = ("Contestant", "Loss ± std (n)", "Target", "Difference", "Shown from", "Time")
CONTEST_LEGEND = """\
Difference, Time: from the parent, or else from the first contestant. Shown from: the smallest
difference that would be significant, p < 0.01. records/README.md has the rest."""
FRONT = ("Record", "Idea", "Public record (min), not run here", "Changed lines")


# ---- Tables ----
def table(heading: tuple, rows: list) -> str:
    lines = []
    for cells in (heading, ["---"] * len(heading), *rows):
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plain(parts: list) -> str:
    """Parts of a page for a terminal: links are their words, and a table's columns line up."""
    shown = []
    for part in parts:
        lines = re.sub(r"\[(.+?)\]\(.+?\)", r"\1", part).splitlines()
        if part.startswith("| "):
            rows = [line[2:-2].split(" | ") for line in lines]
            widths = [max(map(len, column)) for column in zip(*rows)]
            rows[1] = ["-" * width for width in widths]
            lines = ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in rows]
        shown.append("\n".join(lines))
    return "\n\n".join(shown)


def link(record: Record, above: str = "") -> str:
    """The record's name, which leads to its folder; `above` is the way there."""
    return f"[{record.name}]({above}{record.folder.name})"


def minutes_of(times: list) -> str:
    times = [ms for ms in times if ms]
    return f"{statistics.median(times) / 60_000:.3f}" if times else ""


def ladder(records: list, above: str = "") -> str:
    """What is published of each record, and how far ours is from it."""
    rows = []
    for record in records:
        loss = largest = ""
        if record.published.get("val_loss"):
            loss = "{val_loss:.4f} ({n})".format(**record.published)
        if record.claim.get("equality"):
            largest = f"{record.claim['equality']['largest']:.0e}"
        rows.append([link(record, above), record.minutes, loss, largest])
    return table(LADDER, rows)


def runs_cells(logs: list, against: Comparison | None, mark: str = ""):
    """What logs of one setting give, by themselves and against others."""
    losses = [log.val_loss for log in logs]
    loss = f"{statistics.fmean(losses):.4f}"
    if len(losses) > 1:
        loss += f" ± {statistics.stdev(losses):.4f}"
    p = p_below(losses, float(logs[0].header["target_loss"]))
    below = "" if p is None else f"{p:.1g}"
    difference = time = ""
    if against and against.equal:
        difference = "equal"
    elif against:
        difference = f"{against.difference:+.4f}"
        if against.p is not None:
            difference += f" (p {against.p:.2g})" + "*" * against.shown
        difference += mark
    if against and against.ratios:
        time = f"×{against.time:.3f} ({min(against.ratios):.3f}–{max(against.ratios):.3f})"
    minutes = minutes_of([log.measured_ms for log in logs])
    cells = [f"{loss} ({len(losses)})", below, minutes, difference, time]
    return [cell.replace("-", "−") for cell in cells]


def runs_row(record: Record, logs: list, others: list, above: str = ""):
    """A record's logs of one setting, against its parent's there."""
    mark = "†" if others and is_retuned(logs[0], others[0]) else ""
    return [link(record, above), *runs_cells(logs, compare(logs, others), mark)]


def overview(records: list):
    """Parts of a page: the claims, and the runs of the settings that count most.

    Those are all of the preset record, and then those in which a third of the records was run.
    """
    rows = {}
    for record in records:
        for logs, others in record.measured():
            rows.setdefault(logs[0].setting, []).append(runs_row(record, logs, others))
    parts = [ladder(records), LADDER_LEGEND]
    order = sorted(rows, key=lambda setting: len(rows[setting]), reverse=True)
    for setting in sorted(order, key=lambda setting: setting[0] != "record"):
        if setting[0] == "record" or 3 * len(rows[setting]) >= len(records):
            parts += [machine_words(setting) + ":", table(RUNS, rows[setting])]
    return [*parts, RUNS_LEGEND]


def contest(contestants: list):
    """What `run` found: each contestant against its parent, or else against the first one."""
    rows, by_folder = [], {}
    for one in contestants:
        if one.record:
            by_folder[one.record.folder.name] = one
    for one in contestants:
        name = one.operand.replace(".py", "", 1)
        other = contestants[0]
        if one.record:
            name = one.record.name
            other = by_folder.get(one.record.claim["parent"], other)
        against = None if one is contestants[0] else compare(one.logs, other.logs)
        shown_from = ""
        if against and against.smallest_shown:
            shown_from = f"{against.smallest_shown:.2g}"
        loss, below, _, difference, time = runs_cells(one.logs, against)
        rows.append([name, loss, below, difference, shown_from, time])
    return [table(CONTEST, rows), CONTEST_LEGEND]


def others(logs: list, folder: Path) -> str:
    """Other people's logs, by their last steps."""
    rows = []
    for log in logs:
        steps = f"{log.last_step:,}"
        if not log.finished and log.planned_steps:
            steps += f" of {log.planned_steps:,}"
        name = re.sub(r"[|\[\]\x00-\x1f]", "?", log.path.relative_to(folder).as_posix())
        minutes = minutes_of([log.train_time_ms])
        rows.append([name, steps, f"{log.val_loss:.4f}", minutes])
    return table(("Log", "Steps", "Loss", "Minutes"), rows)


# ---- Pages ----
def blocks(folder: Path, records: list):
    """README: the generated lines of each of its blocks, by what stands in its first line."""
    found = {record.folder / "README.md": {"": record_block(record)} for record in records}
    found[folder / "README.md"] = {"": records_block(records)}
    front = folder.parent / "README.md"
    if front.exists():
        found[front] = {"": front_block(records, f"{folder.name}/"), " gpus": gpus_block(records)}
    return found


def front_block(records: list, above: str) -> str:
    """The records on the front page, each with the number of lines that it changed."""
    rows = []
    for record in records:
        lines = count_changes(record.parent.script, record.script) if record.parent else ""
        minutes = record.minutes or "not public"
        rows.append([link(record, above), record.claim["change"], minutes, lines])
    return table(FRONT, rows)


def records_block(records: list) -> str:
    """All claims, the runs of the settings that count most, and the rules."""
    rules = []
    for preset, rule in RULES.items():
        rules.append([preset, *(f"`{value or 'not known here'}`" for value in rule.values())])
    parts = overview(records)
    parts.append(table(("preset", *RULES["record"]), rules))
    return "\n\n".join(parts)


def record_block(record: Record) -> str:
    """A record beside its parent: claims, and the runs of each of its settings."""
    parts = [ladder([one for one in (record.parent, record) if one], "../")]
    if not record.on_gpu:
        parts.append("No GPU has run this record yet.")
    for logs, others in record.measured():
        rows = [runs_row(record, logs, others, "../")]
        if others:
            rows.insert(0, runs_row(record.parent, others, [], "../"))
        parts += [machine_words(logs[0].setting) + ":", table(RUNS, rows)]
    parts.append("[What the columns and marks mean](../README.md).")
    return "\n\n".join(parts)


def gpus_block(records: list) -> str:
    """What GPUs have run, or that none has."""
    names = [record.name for record in records if record.on_gpu]
    return f"**GPUs have run** {', '.join(names)}." if names else "**No GPU has run it yet.**"


def filled(path: Path, parts: dict) -> str:
    """A README's text with its blocks filled. Raises LedgerError where it lacks one."""
    text = read_text(path)
    for name, part in parts.items():
        begin, end = f"<!-- ledger: begin{name} -->\n", "<!-- ledger: end -->"
        before, found, rest = text.partition(begin)
        if not found or end not in rest:
            raise LedgerError(f"{path} has no lines {begin.strip()} and {end}; add them")
        text = f"{before}{begin}{part}\n{end}{rest.partition(end)[2]}"
    return text


def write_pages(folder: Path, records: list):
    """Make the READMEs' generated lines and the ladder's picture anew. Raises LedgerError."""
    picture, texts = ladder_figure(records), {}
    for path, parts in blocks(folder, records).items():  # all are made before one is written
        texts[path] = filled(path, parts)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8", newline="")
    picture.savefig(folder / "ladder.png", dpi=200, metadata={"Software": None})


# ---- Pictures ----
def new_figure(height: float, width: float):
    import matplotlib.style
    from matplotlib.figure import Figure

    matplotlib.style.use(["tableau-colorblind10", {
        "font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
        "grid.color": "#e3e6e9", "legend.frameon": False}])
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def ladder_figure(records: list, width: float = 9):
    """Published minutes of each record."""
    rows = [(record.name, record.published["minutes"]) for record in records if record.published]
    figure, axis = new_figure(0.36 * len(rows) + 1.1, width)
    for y, (_, minutes) in enumerate(rows):
        axis.plot(minutes, y, "o", color="C0", markersize=8)
        axis.text(minutes * 1.06, y, f"{minutes:g}", va="center")
    times = [minutes for _, minutes in rows] or [1]
    left, right = 0.9 * min(times), max(22, 1.4 * max(times))
    axis.set(xscale="log", xlabel="published minutes on 8×H100 (logarithmic)")
    axis.set(xlim=(left, right), ylim=(max(1, len(rows)) - 0.5, -0.5))
    axis.set_yticks(range(len(rows)), [name for name, _ in rows])
    axis.set_xticks([tick for tick in (0.7, 1, 1.5, 2, 3, 5, 10, 20) if tick > left])
    axis.xaxis.set_major_formatter("{x:g}")
    axis.minorticks_off()
    return figure
