"""What is shown: tables on the terminal, the generated lines of the READMEs, the ladder."""

import statistics
import textwrap
from pathlib import Path

from ledger.logs import LedgerError, machine_words, read_text
from ledger.records import RULES, Comparison, Record, compare, is_retuned, p_below
from ledger.scripts import count_changes

WIDTH = 100  # columns of a terminal
# The newest public record and its minutes, by the table of github.com/KellerJordan/modded-nanogpt
# as it stood on 2026-10-03.
NEWEST, NEWEST_MONTH, NEWEST_MINUTES = 92, "September 2026", 0.665
GREY = "#8a9299"

LADDER = ("Record", "Public record (min), not run here", "Its loss (n)", "Float64")
LADDER_LEGEND = """\
Minutes and losses are those of the public record's n runs on 8×H100 (#91's loss: on one H100), by
its own files. Float64: the largest difference of our script from the public one."""
RUNS = ("Record", "Loss ± std (n)", "Target", "Minutes", "Difference", "Time")
CONTEST = ("Contestant", "Loss ± std (n)", "Target", "Difference", "Shown from", "Time")
RUNS_LEGEND = """\
Loss: all runs of a setting. Target: p that the mean lies below the rules' target. Difference: from
the parent's mean in the same setting, with the two-sided p of the paired t-test; * where p < 0.01;
"equal" where each seed's loss is the parent's to the digit. †: the record also changes this
preset's rates or its validation, so the difference is not the idea's alone. Minutes (median), Time
(its ratio to the parent's; the smallest and largest ratio by seed): of whole runs alone on their
machine."""
CONTEST_LEGEND = """\
Target: p of a one-sided t-test that the mean lies below target_loss. Difference: from the parent's
mean, or else the first contestant's, with the p of a two-sided t-test, paired by seed; * where
p < 0.01. Shown from: the smallest difference that would reach that. Time: ratio of the medians,
and range of the ratios by seed, which only runs alone on the machine (--jobs 1) measure."""
FRONT = ("Record", "Idea", "Public record (min), not run here", "Changed lines")


# ---- Tables ----
def text_table(heading: tuple, rows: list) -> str:
    widths = [max(map(len, column)) for column in zip(heading, *rows)]
    lines = []
    for cells in (heading, ["-" * width for width in widths], *rows):
        lines.append("  ".join(map(str.ljust, cells, widths)).rstrip())
    return "\n".join(lines)


def markdown(heading: tuple, rows: list) -> str:
    lines = []
    for cells in (heading, ["---"] * len(heading), *rows):
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def name_of(record: Record, above: str | None) -> str:
    """The record's name, which leads to its folder where `above`, the way there, is given."""
    return record.name if above is None else f"[{record.name}]({above}{record.folder.name})"


def minutes_of(times: list) -> str:
    times = [ms for ms in times if ms]
    return f"{statistics.median(times) / 60_000:.3f}" if times else ""


def ladder(records: list, table, above: str | None = None) -> str:
    """What is published of each record, and how far ours is from it."""
    rows = []
    for record in records:
        published, equality = record.published, record.claim.get("equality")
        minutes = f"{published['minutes']:g}" if published else ""
        loss = "{val_loss:.4f} ({n})".format(**published) if published.get("val_loss") else ""
        largest = f"{equality['largest']:.0e}" if equality else ""
        rows.append([name_of(record, above), minutes, loss, largest])
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


def runs_row(record: Record, logs: list, others: list, above: str | None = None):
    """A record's logs of one setting, against its parent's there."""
    mark = "†" if others and is_retuned(logs[0], others[0]) else ""
    return [name_of(record, above), *runs_cells(logs, compare(logs, others), mark)]


def shown_settings(records: list):
    """(setting: its rows, of those that the table of all records shows; the number of the others).

    A row is a record, its logs and its parent's. Shown are all settings of the record's preset,
    then those in which a third of the records was run.
    """
    found = {}
    for record in records:
        for logs, others in record.measured():
            found.setdefault(logs[0].setting, []).append((record, logs, others))
    shown = [setting for setting, rows in found.items()
             if setting[0] == "record" or 3 * len(rows) >= len(records)]
    shown.sort(key=lambda setting: (setting[0] != "record", -len(found[setting])))
    return {setting: found[setting] for setting in shown}, len(found) - len(shown)


def overview(records: list, table, above: str | None = None):
    """Parts of a page: the claims, and the runs of the settings that count most."""
    parts = [ladder(records, table, above), LADDER_LEGEND]
    shown, left = shown_settings(records)
    for setting, runs in shown.items():
        parts.append(machine_words(setting) + ":")
        parts.append(table(RUNS, [runs_row(*run, above) for run in runs]))
    if left:
        parts.append(f"Runs in {left} more setting(s) stand on the records' pages.")
    return [*parts, RUNS_LEGEND]


def ladder_text(records: list) -> str:
    """Claims and runs for a terminal."""
    parts = overview(records, text_table)
    return "\n\n".join(part if "\n" in part else textwrap.fill(part, WIDTH) for part in parts)


def contest_text(contestants: list) -> str:
    """What `run` found: each contestant against its parent, or else against the first one."""
    rows, by_folder = [], {one.record.folder.name: one for one in contestants if one.record}
    for one in contestants:
        parent = by_folder.get(one.record.claim["parent"]) if one.record else None
        against = None
        if one is not contestants[0]:
            against = compare(one.logs, (parent or contestants[0]).logs)
        shown_from = f"{against.smallest_shown:.2g}" if against and against.smallest_shown else ""
        name = one.record.name if one.record else one.operand.replace(".py", "", 1)
        loss, below, _, difference, time = runs_cells(one.logs, against)
        rows.append([name, loss, below, difference, shown_from, time])
    return f"{text_table(CONTEST, rows)}\n\n{CONTEST_LEGEND}"


def others_text(logs: list, folder: Path) -> str:
    """Other people's logs, by their last steps."""
    rows = []
    for log in logs:
        steps = f"{log.last_step:,}"
        if not log.finished:
            steps += f" of {log.planned_steps:,}"
        rows.append([log.path.relative_to(folder).as_posix(), (log.source_sha256 or "")[:6], steps,
                     f"{log.val_loss:.4f}", minutes_of([log.train_time_ms])])
    return text_table(("Log", "Source", "Steps", "Loss", "Minutes"), rows)  # Source: its sha256


# ---- Pages ----
def blocks(folder: Path, records: list):
    """README: the generated lines of each of its blocks, by the block's name."""
    found = {folder / "README.md": {"": records_block(records)}}
    if (folder.parent / "README.md").exists():
        found[folder.parent / "README.md"] = {"": front_block(records, f"{folder.name}/"),
                                              "gpus": gpus_block(records)}
    for record in records:
        found[record.folder / "README.md"] = {"": record_block(record)}
    return found


def front_block(records: list, above: str) -> str:
    """The records on the front page, each with the number of lines that it changed."""
    rows = []
    for record in records:
        lines = count_changes(record.parent.script, record.script) if record.parent else ""
        minutes = f"{record.published['minutes']:g}" if record.published else "not public"
        rows.append([name_of(record, above), record.claim["change"], minutes, lines])
    return markdown(FRONT, rows)


def records_block(records: list) -> str:
    """All claims, the runs of the settings that count most, and the rules."""
    rules = []
    for preset, rule in RULES.items():
        rules.append([preset, *(f"`{value or 'not known here'}`" for value in rule.values())])
    return "\n\n".join([*overview(records, markdown, ""),
                        markdown(("preset", *RULES["record"]), rules)])


def record_block(record: Record) -> str:
    """A record beside its parent: claims, and the runs of each of its settings."""
    both = [one for one in (record.parent, record) if one]
    parts = [ladder(both, markdown, "../")]
    if not any(log.on_gpu for log in record.logs):
        parts.append("No GPU has run this record yet.")
    for logs, others in record.measured():
        rows = []
        if others:
            rows.append(runs_row(record.parent, others, [], "../"))
        rows.append(runs_row(record, logs, others, "../"))
        parts += [machine_words(logs[0].setting) + ":", markdown(RUNS, rows)]
    parts.append("[What the columns and marks mean](../README.md).")
    return "\n\n".join(parts)


def gpus_block(records: list) -> str:
    """What GPUs have run, or that none has."""
    logs = [log for record in records for log in record.logs if log.on_gpu]
    if not logs:
        return "**No GPU has run it yet.**"
    names = [record.name for record in records if any(log.on_gpu for log in record.logs)]
    devices = sorted({log.header["device"] for log in logs})
    return textwrap.fill(f"**On GPUs** there are {len(logs)} runs here: of {', '.join(names)}, on "
                         f"{', '.join(devices)}.", 110, break_on_hyphens=False)


def filled(path: Path, text: str, parts: dict) -> str:
    """A README's text with its blocks filled. Raises LedgerError where it lacks one."""
    for name, part in parts.items():
        begin, end = f"<!-- ledger: begin{' ' * bool(name)}{name} -->\n", "<!-- ledger: end -->"
        before, found, rest = text.partition(begin)
        if not found or end not in rest:
            raise LedgerError(f"{path} has no lines {begin.strip()} and {end}; add them")
        text = f"{before}{begin}{part}\n{end}{rest.partition(end)[2]}"
    return text


def write_pages(folder: Path, records: list):
    """Make the READMEs' generated lines and the ladder's picture anew. Raises LedgerError."""
    texts = {}
    for path, parts in blocks(folder, records).items():  # all are made before one is written
        texts[path] = filled(path, read_text(path), parts)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8", newline="")
    picture = ladder_figure(records)
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
    """Published minutes of each record, and of the newest public one in grey."""
    published = [record for record in records if record.published]
    rows = [(record.name, record.published["minutes"], "C0") for record in published]
    if NEWEST not in [record.published["number"] for record in published]:
        rows.append((f"#{NEWEST} ({NEWEST_MONTH})", NEWEST_MINUTES, GREY))
    figure, axis = new_figure(0.36 * len(rows) + 1.1, width)
    for y, (_, minutes, color) in enumerate(rows):
        axis.plot(minutes, y, "o", color=color, markersize=8)
        axis.text(minutes * 1.06, y, f"{minutes:g}", va="center")
    fastest = min(minutes for _, minutes, _ in rows)
    axis.set(xscale="log", xlabel="published minutes on 8×H100 (logarithmic)")
    axis.set(xlim=(0.9 * fastest, 22), ylim=(len(rows) - 0.5, -0.5))
    axis.set_yticks(range(len(rows)), [name for name, *_ in rows])
    axis.set_xticks([tick for tick in (0.7, 1, 1.5, 2, 3, 5, 10, 20) if tick > 0.9 * fastest])
    axis.xaxis.set_major_formatter("{x:g}")
    axis.minorticks_off()
    return figure
