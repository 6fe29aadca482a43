"""What is shown: the generated lines of the READMEs, and the same for a terminal."""

import csv
import math
import re
import statistics
from pathlib import Path

from ledger.logs import LedgerError, machine_words, read_text, why_not_counted
from ledger.records import PRESETS, Record, by_seed, compare, read_public
from ledger.scripts import count_changes, diff_sources
from ledger.steps import reached_by_all, steps_words

UPSTREAM = "https://github.com/KellerJordan/modded-nanogpt/"
PULL = f"{UPSTREAM}pull/"
# Where GitHub leads to this repository's site, in any fork; seen from a record's page
SITE = "../../../../deployments/github-pages"
# The public records that the front page keeps, beside our own and the newest
MILESTONES = (2, 4, 5, 12, 14, 19, 29, 42, 53, 62, 81, 92)
FRONT = ("Record", "Idea", "Public record (min)", "Changed lines")
LADDER = (*FRONT[:3], "Published loss (runs)", "Small model, CPU", "Largest difference (float64)",
          "Changed lines")
BY_STEPS = (*FRONT[:2], "Published steps", *LADDER[3:])
RUNS = ("Record", "Machine", "Loss ± std (seeds)", "Below target", "Minutes", "From its parent")
NO_GPU = "**No GPU has run one of our scripts yet.**"
PUBLIC = ("Record", "Date", "Minutes", "Idea", "By", "Script here")
RESULTS = ("Result", "Date", "Steps", "Loss (runs)", "Idea", "By", "Script here")
CONTEST = ("Contestant", "Loss ± std (seeds)", "Difference ± error", "Time")
CONTEST_LEGEND = """\
Difference: from the first contestant, by seed, ± its standard error; * where p < 0.01. Steps: to
the loss that all runs of the first one reach, or --target; interpolated, ± the interval of 95 %."""
TIME_LEGEND = """\
Time: the median of the ratios to the first contestant, and the smallest and largest. Runs that
waited for other programs, ran beside others or were resumed have none."""
# A link to where a function is defined: its name, the script, the line
DEFINED = re.compile(r"\[`([\w.]+)`\]\(([\w./-]+\.py)#L(\d+)\)")
OTHERS = ("Logs", "n", "Steps", "Loss ± std (n)", "Below target", "Median minutes (from–to)",
          "From the baseline", "Sources that differ")


# ---- Cells and tables ----
def table(heading: tuple, rows: list) -> str:
    """Rows have their cells in order, or by the heading's names: then no column is empty."""
    if rows and isinstance(rows[0], dict):
        heading = [name for name in heading if any(row[name] for row in rows)]
        rows = [[row[name] for name in heading] for row in rows]
    lines = ["| " + " | ".join(row) + " |" for row in (heading, ["---"] * len(heading), *rows)]
    return "\n".join(lines)


def plain(text: str) -> str:
    """Parts of a page for a terminal: links are their words, and a table's columns line up."""
    parts = re.sub(r"\[(.+?)\]\(.+?\)", r"\1", text).split("\n\n")
    for number, part in enumerate(parts):
        if part.startswith("| "):
            rows = [line[2:-2].split(" | ") for line in part.splitlines()]
            widths = [max(map(len, column)) for column in zip(*rows)]
            rows[1] = ["-" * width for width in widths]
            lines = ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in rows]
            parts[number] = "\n".join(lines)
    return "\n\n".join(parts)


def link(record: Record, above: str = "") -> str:
    """The record's name, which leads to its folder; `above` is the way there."""
    place = "optimizers/" if record.ladder == "steps" else ""
    return f"[{record.name}]({above}{place}{record.folder.name})"


def place_of(record: Record) -> str:
    """Where a record belongs that retells no public one by itself."""
    if record.result:
        return f"{record.published['steps']:,}"
    if record.leads_to:
        return f"step to {'#' if record.ladder == 'time' else 'o'}{record.leads_to}"
    step = re.match(r"(\d+)[a-z]\d? ", record.name)  # it comes after what it is a part of
    return f"part of #{step[1]}" if step else "own"


def spread(losses: list) -> str:
    """Mean, standard deviation and number."""
    deviation = f" ± {statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
    return f"{statistics.fmean(losses):.4f}{deviation} ({len(losses)})"


def below(losses: list, target: float) -> str:
    """The p of the one-sided t-test that the mean lies below a target; nothing without spread.

    A loss that is infinite, of a run that diverged, leaves nothing below.
    """
    if math.inf in losses:
        return "1"
    if len(set(losses)) < 2:
        return ""
    from scipy import stats  # a second, which other verbs do not wait for

    p = stats.ttest_1samp(losses, target, alternative="less").pvalue
    return f"{p:.2g}".replace("-", "−")


def minutes_of(times: list) -> str:
    times = [ms for ms in times if ms]
    return f"{statistics.median(times) / 60_000:.3f}" if times else ""


def difference_words(difference: float, *, error: float | None = None, p: float | None = None,
                     is_shown: bool = False, time: float | None = None) -> str:
    """A difference of mean losses, with its standard error, p and ratio of times where they are.

    It has a star where the runs show it.
    """
    words = f"{difference:+.4f}"
    if error is not None:
        words += f" ± {error:.4f}"
    if p is not None:
        words += f" (p {p:.2g})"
    if is_shown:
        words += "*"
    if time:
        words += f", ×{time:.3f}"
    return words.replace("-", "−")


def losses_of(logs: list) -> list:
    return [loss for loss, _ in by_seed(logs).values()]


def run_cells(record: Record, setting: tuple) -> list:
    """What a record's runs of a setting gave; p-values say nothing about the pocket."""
    logs, is_full = record.runs()[setting], setting[0] == "record"
    losses = losses_of(logs)
    p = below(losses, float(logs[0].header["target_loss"])) if is_full else ""
    found = compare(logs, record.parent.runs().get(setting, []) if record.parent else [])
    difference = ""
    if found:
        p_value = found.p_value() if is_full else None
        difference = difference_words(found.difference, p=p_value, time=found.time)
    return [spread(losses), p, minutes_of([log.measured_ms for log in logs]), difference]


# ---- Parts of pages ----
def ladder_rows(records: list, pocket: tuple, above: str = "", heading: tuple = LADDER) -> list:
    """What is published of each record, and what our script gave, in the setting `pocket`."""
    rows = []
    for record in records:
        minutes = record.minutes or place_of(record)
        loss = equality = lines = small = ""
        if record.published.get("val_loss"):
            loss = "{val_loss:.4f} ({n})".format(**record.published)
        if record.claim["equality"]:
            equality = f"{record.claim['equality']['largest']:.0e}"
        if record.parent:
            found = diff_sources(record.parent.script, record.script)
            lines = count_changes(*found.values())
        if pocket in record.runs():
            small = spread(losses_of(record.runs()[pocket]))
        cells = [link(record, above), record.claim["change"], minutes, loss, small, equality, lines]
        rows.append(dict(zip(heading, cells)))
    return rows


def runs_table(records: list, presets: tuple, above: str = "") -> str:
    """A row for each setting in which each record was run."""
    rows = []
    for record in records:
        for setting in record.runs():
            if setting[0] in presets:
                machine = machine_words(setting).removeprefix("Preset ")
                rows.append([link(record, above), machine, *run_cells(record, setting)])
    return table(RUNS, rows) if rows else "No GPU has run one of them yet."


def public_table(folder: Path, records: list) -> str:
    """All public records, and where each is here, or why it is not."""
    scripts = {record.number: link(record) for record in records if record.number}
    rows = []
    for number, row in read_public(folder).items():
        name = f"[#{number}]({PULL}{row['pr']})" if "pr" in row else f"#{number}"
        place = scripts.get(number) or scripts.get(row.get("within"))
        rows.append([name, row["date"], row["minutes"], row["idea"], row["by"],
                     place or row.get("none", "not yet")])
    return table(PUBLIC, rows)


def results_table(folder: Path, records: list) -> str:
    """All public results by steps, of public.csv, and where each is here. Bold: a record then."""
    path = folder / "optimizers" / "public.csv"
    if not path.exists():
        return "public.csv is missing."
    scripts = {record.result: f"[{record.name}]({record.folder.name})" for record in records
               if record.result}
    rows = []
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            number, pull = int(row["result"]), row["pull_request"]
            steps = f"{int(row['steps']):,}"
            rows.append([
                f"[#{number}]({PULL}{pull})" if pull else f"#{number}", row["date"],
                f"**{steps}**" if row["was_record"] else steps, f"{row['loss']} ({row['n']})",
                row["idea"], row["authors"], scripts.get(number, "")])
    return table(RESULTS, rows)


def published_logs(folder: Path) -> dict:
    """Number of a public record: (the place of its log, or of a folder of logs; how many)."""
    path = folder / "public_curves.csv"
    if not path.exists():
        return {}
    with path.open(encoding="utf-8") as file:
        return {int(row["record"]): (row["source"], int(row["logs"]))
                for row in csv.DictReader(file)}


def sources(record: Record, records: list, public: dict, logs: dict) -> str:
    """Links to what a record retells, its script and its diff; nothing of a record of our own.

    `logs` are `published_logs`.
    """
    if record.ladder == "steps":
        return sources_by_steps(record) if record.result or record.leads_to else ""
    number = record.number or record.leads_to
    if not number and (step := re.match(r"(\d+)[a-z]", record.name)):  # a part that comes after
        number = int(step[1])
    if not number:
        return ""
    whole = next((one for one in records if one.number == number), record)
    links = []
    log, count = logs.get(number, ("", 0))
    source = whole.published.get("source", "")
    place = re.search(r"records/[\w./-]+|(?<=commit )\w+", source) or re.match(
        r"records/[\w-]+/[\w-]+", log)
    if place:
        tree = "tree/master/" if "/" in place[0] else "tree/"
        links.append(f"[public record #{number}]({UPSTREAM}{tree}{place[0]})")
    if pull := public.get(number, {}).get("pr"):
        links.append(f"[pull request {pull}]({PULL}{pull})")
    if log:
        words = "published log" if count == 1 else f"{count} published logs"
        tree = "blob" if count == 1 else "tree"
        links.append(f"[{words}]({UPSTREAM}{tree}/master/{log})")
    links.append("[our script](train_gpt.py)")
    if record.parent:
        links.append(f"[diff, on the site]({SITE})")
    return " · ".join(links)


def sources_by_steps(record: Record) -> str:
    """The same of a record by steps; a step to a result has no public page of its own."""
    links = []
    if place := re.search(r"records/[\w./-]+", record.published.get("source", "")):
        links.append(f"[public result #{record.result}]({UPSTREAM}tree/master/{place[0]})")
    links.append("[our script](train_gpt.py)")
    if record.parent:
        links.append(f"[its parent](../{record.parent.folder.name})")
    return " · ".join(links)


def blocks(folder: Path, records: list) -> dict:
    """Page: the generated lines of each of its blocks, by what stands in its first line."""
    found, on_gpu = {}, []  # of these are runs of full size
    public, logs = read_public(folder), published_logs(folder)
    for record in records:
        presets = [log.header["preset"] for log in record.logs if log.on_gpu]
        if "record" in presets:
            on_gpu.append(record)
        words = "" if presets else "No GPU has run this record yet.\n\n"
        above = "../../" if record.ladder == "steps" else "../"
        runs = runs_table([record], PRESETS, above) if record.logs else "It has no runs yet."
        found[record.folder / "README.md"] = {"": words + runs}
        if line := sources(record, records, public, logs):
            found[record.folder / "README.md"][" sources"] = line

    by_time = [record for record in records if record.ladder == "time"]
    pocket, legend = most_common_pocket(by_time)
    parts = [table(LADDER, ladder_rows(by_time, pocket)), legend, runs_table(by_time, ("record",))]
    found[folder / "README.md"] = {
        "": "\n\n".join(parts), " public": public_table(folder, records)}
    by_steps = [record for record in records if record.ladder == "steps"]
    if by_steps:
        setting, legend = most_common_pocket(by_steps)
        rows = ladder_rows(by_steps, setting, "../", BY_STEPS)
        parts = [table(BY_STEPS, rows), legend, runs_table(by_steps, ("record",), "../")]
        found[folder / "optimizers/README.md"] = {
            "": "\n\n".join(parts), " public": results_table(folder, by_steps)}

    kept = [record for record in by_time if record.number in MILESTONES
            or not (record.number or record.leads_to) or record is by_time[-1]]
    if (folder.parent / "README.md").exists():
        found[folder.parent / "README.md"] = {
            "": table(FRONT, ladder_rows(kept, pocket, f"{folder.name}/")),
            " gpus": runs_table(on_gpu, ("record",), f"{folder.name}/") if on_gpu else NO_GPU}
    if (techniques := folder.parent / "docs/techniques.md").exists():
        found[techniques] = {}  # no blocks, but links to functions
    return found


def most_common_pocket(records: list) -> tuple:
    """(the setting of the pocket in which most records were run, a sentence that says which)."""
    settings = [setting for record in records for setting in record.runs()]
    pockets = [setting for setting in settings if setting[0] == "pocket"]
    pocket = max(pockets, key=pockets.count, default=())
    machine = machine_words(pocket).removeprefix("Preset pocket on ") or "no machine yet"
    return pocket, f"Small model (the preset pocket): on {machine}."


def line_of(script: Path, name: str) -> int:
    """The line that defines a function, a class, or a class's method. Raises LedgerError."""
    owner, _, own = name.rpartition(".")
    pattern = rf"^(class|def) {own}\b"
    if owner:
        pattern = rf"^class {owner}\b.*\n(( {{4}}.*)?\n)*? {{4}}def {own}\b"
    source = read_text(script)
    found = re.search(pattern, source, re.MULTILINE)
    if not found:
        raise LedgerError(f"{script} does not define {name}; mend the pages that link it")
    return source.count("\n", 0, found.end()) + 1


def filled(path: Path, parts: dict) -> str:
    """A page's text with its blocks filled and its links to functions at the right lines.

    Raises LedgerError where it lacks a block, or where a script has no such function.
    """
    text = read_text(path)
    for name, part in parts.items():
        begin, end = f"<!-- ledger: begin{name} -->\n", "<!-- ledger: end -->"
        before, found, rest = text.partition(begin)
        if not found or end not in rest:
            raise LedgerError(f"{path} has no lines {begin.strip()} and {end}; add them")
        text = f"{before}{begin}{part}\n{end}{rest.partition(end)[2]}"

    def with_line(link):
        name, script, _ = link.groups()
        return f"[`{name}`]({script}#L{line_of(path.parent / script, name)})"

    return DEFINED.sub(with_line, text)


# ---- What a terminal shows ----
def curves_of(logs: list) -> list:
    return [log.runs[0]["val_loss"] for log in logs]


def contest(contestants: list, target: float | None) -> str:
    """What `run` found: each contestant against the first one, and its steps to a loss."""
    first = contestants[0]
    target = target or reached_by_all(curves_of(first.logs))
    heading, rows = (*CONTEST, f"Steps to {target:.4f}"), []
    for one in contestants:
        name = one.operand.replace(".py", "", 1)
        losses = losses_of(one.logs)
        diverged = losses.count(math.inf)
        loss = f"{diverged} of {len(losses)} diverged" if diverged else spread(losses)
        difference = time = ""
        is_compared = one is not first and math.inf not in losses + losses_of(first.logs)
        if is_compared and (found := compare(one.logs, first.logs)):
            difference = difference_words(found.difference, error=found.error(),
                                          p=found.p_value(), is_shown=found.is_shown())
            if found.ratios:
                time = f"×{found.time:.3f} ({min(found.ratios):.3f}–{max(found.ratios):.3f})"
        cells = [name, loss, difference, time, steps_words(curves_of(one.logs), target)]
        rows.append(dict(zip(heading, cells)))
    legend = [CONTEST_LEGEND]
    if any(row["Time"] for row in rows):
        legend.append(TIME_LEGEND)
    return "\n".join([f"{table(heading, rows)}\n", *legend])


def others(logs: list, folder: Path, target: float) -> str:
    """Other people's logs: a row for each folder, and of one folder alone for each of its logs.

    Runs are compared with those of the folder beside theirs that is called a baseline.
    """
    groups = {}
    for log in logs:
        groups.setdefault(log.path.parent, []).append(log)
    if len(groups) == 1:
        groups |= {log.path: [log] for log in logs}
    rows = []
    for path, some in groups.items():
        if all(log.last_step is None for log in some):  # none is a log
            continue
        name = re.sub(r"[|\[\]\x00-\x1f]", "?", path.relative_to(folder).as_posix())
        whole = [log for log in some if log.finished]
        steps = {f"{log.last_step:,}" for log in whole} or set(map(why_not_counted, some))
        diverged = [math.inf for log in some if log.diverged_at is not None]
        losses = [log.val_loss for log in whole or some if log.diverged_at is None]
        number = f"{len(whole)} of {len(some)}" if len(whole) < len(some) else f"{len(whole)}"
        times = [log.train_time_ms for log in whole if log.train_time_ms]
        minutes = minutes_of(times)
        if len(times) > 1:
            minutes += f" ({minutes_of([min(times)])}–{minutes_of([max(times)])})"
        beside = [other for other in groups if other.parent == path.parent
                  and "baseline" in other.name.lower()]
        difference = ""
        if beside and path not in beside:
            difference = from_baseline(some, groups[beside[0]])
        rows.append(dict(zip(OTHERS, [
            name, number, ", ".join(sorted(steps)), spread(losses) if losses else "nan",
            below(losses + diverged, target), minutes, difference, sources_differ(some)])))
    return table(OTHERS, rows)


def from_baseline(logs: list, baseline: list) -> str:
    """The difference of public runs, whose seeds differ: by Welch's test, of unequal variances.

    Nothing where a run diverged, as their mean is no number then.
    """
    if any(log.diverged_at is not None for log in logs + baseline):
        return ""
    logs, baseline = ([log for log in some if log.finished] for some in (logs, baseline))
    if min(len(logs), len(baseline)) < 2:
        return ""
    from scipy import stats

    ours, theirs = ([log.val_loss for log in some] for some in (logs, baseline))
    p = stats.ttest_ind(ours, theirs, equal_var=False).pvalue
    times = [[log.train_time_ms for log in some if log.train_time_ms] for some in (logs, baseline)]
    time = statistics.median(times[0]) / statistics.median(times[1]) if all(times) else None
    return difference_words(statistics.fmean(ours) - statistics.fmean(theirs), p=p, time=time)


def sources_differ(logs: list) -> str:
    """How many sources wrote the logs, where they differ, and by how many lines, of two of them."""
    found = sorted({log.source for log in logs if log.source})
    if len(found) < 2:
        return ""
    changes = count_changes(*diff_sources(found[0], found[-1]).values())
    return f"{len(found)} ({changes})"
