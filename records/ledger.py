#!/usr/bin/env python3
"""The ledger: list, diff, compare, measure and verify the records, and read anyone's logs.

    python records/ledger.py list [FOLDER] [--write]                the table of records
    python records/ledger.py diff A B [--stat] [--html OUT]         sources, section by section
    python records/ledger.py curves A B ... [--png OUT]             loss over steps, tokens, time
    python records/ledger.py run A B ... --preset pocket --seeds 10     measure, in turns
    python records/ledger.py verify [FOLDER]                        hold every claim to its logs
    python records/ledger.py extract LOG [--file NAME]              the source inside a log
    python records/ledger.py lineage [--png OUT]                    the ladder in one picture

A and B are record folders, scripts or logs: this project's or those of the public lineage, from
the first `s:0 tel:` logs to today's. P-values need scipy and pictures matplotlib, both in
requirements-dev.txt; the rest needs the standard library only. Exit status: 1 where a claim or a
run fails, 2 where the input cannot be used. README.md beside it has the rules and the schema.
"""

import argparse
import ast
import contextlib
import datetime
import difflib
import hashlib
import html
import itertools
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

RECORDS = Path(__file__).resolve().parent
PUBLIC_TARGET = 3.28  # validation loss of the public lineage, for logs that name no target
SIGNIFICANCE = 0.01  # what a p-value has to stay under
RULE = "=" * 100  # the line between the parts of a log
REGION = ("<!-- ledger:begin -->", "<!-- ledger:end -->")  # around the generated text of a README
FOLDER_NAME = re.compile(r"\d{4}-\d{2}-\d{2}_[A-Za-z0-9]+")
SAME = ("preset", "torch", "device", "threads", "world_size")  # one value within a measurement
CLAIM = {"number": int, "change": str, "parent": (str, type(None)), "meets_target": bool,
         "published": (dict, type(None))}
PUBLISHED = {"number": int, "minutes": (int, float), "val_loss": float, "hardware": str,
             "source": str}


class LedgerError(Exception):
    """Input that cannot be used; the message names file or flag, value and remedy."""

    status = 2


class RunError(LedgerError):
    """A run that failed or was stopped."""

    status = 1


# -----------------------------------------------------------------------------
# Logs
# -----------------------------------------------------------------------------


@dataclass
class Log:
    """A training log. Times are milliseconds, None where the log did not time the step."""

    path: Path
    source: str | None = None
    sha256: str | None = None  # of the source, also where a `source sha256:` line stands for it
    body: str = ""  # all that follows the source
    header: dict[str, str] = field(default_factory=dict)
    final: dict[str, str] = field(default_factory=dict)
    train: dict[int, tuple] = field(default_factory=dict)  # step: (train_loss or None, time)
    val: dict[int, tuple] = field(default_factory=dict)  # step: (val_loss, time)
    planned_steps: int | None = None
    error: str | None = None
    notes: list[str] = field(default_factory=list)  # what is odd: stopped, resumed, failed, cut

    @property
    def last_step(self) -> int:
        return max(self.val | self.train, default=0)

    @property
    def finished(self) -> bool:
        """Validated at its last step and, if it is ours, ended by its final block."""
        validated = self.planned_steps is None or self.planned_steps in self.val
        return validated and ("val_loss" in self.final or "run_id" not in self.header)

    @property
    def val_loss(self) -> float:
        """The last validation loss, to all the digits that the log has."""
        return float(self.final.get("val_loss") or self.val[max(self.val)][0])

    @property
    def train_time_ms(self) -> float | None:
        return float(self.final.get("train_time_ms", 0)) or self.val[max(self.val)][1]

    @property
    def target(self) -> float:
        return float(self.header.get("target_loss", PUBLIC_TARGET))

    @property
    def tokens_per_step(self) -> float | None:
        """Training tokens of a step, or None where the log does not tell."""
        if "tokens" in self.final:
            return int(self.final["tokens"]) / int(self.final["steps"])
        fields = hyperparameters(self.source or "") | self.header
        numbers = {name: math.prod(map(int, value.split("*"))) for name, value in fields.items()
                   if re.fullmatch(r"\d+( ?\* ?\d+)*", value)}
        # Ours; one sequence a device; a batch counted in sequences; a batch counted in tokens.
        for names in (("sequences_per_step", "train_seq_len"), ("world_size", "train_seq_len"),
                      ("batch_size", "sequence_length"), ("batch_size",)):
            if numbers.keys() >= set(names):
                return math.prod(numbers[name] for name in names)
        return None

    def reach(self, loss: float) -> tuple | None:
        """(step, time) of the first validation at or below `loss`, or None."""
        return next(((s, ms) for s, (v, ms) in sorted(self.val.items()) if v <= loss), None)


def read_text(path: Path) -> str:
    """The file as text, newlines as they are. Raises LedgerError where it is empty or no text."""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise LedgerError(f"{path}: byte {error.start} is not text; give a log or script") from None
    if not text.strip():
        raise LedgerError(f"{path} is empty; give another log or script")
    if "\0" in text.partition("\n")[0]:  # further on, a model's sample of text may have some
        raise LedgerError(f"{path}: byte {text.index(chr(0))} is not text; give a log or script")
    return text


def read_log(path: Path) -> Log:
    """Parse a log of this project or of any public format. Raises LedgerError where it is none."""
    log, text = Log(path), read_text(path)
    begin = len(RULE) + 1 if text.startswith(RULE + "\n") else 0
    match = re.compile(rf"^{RULE}(\n|\Z)", re.M).search(text, begin)
    before, log.body = (text[begin:match.start()], text[match.start():]) if match else ("", text)
    if stand_in := re.fullmatch(r"source sha256: ([0-9a-f]{64})\n", before):
        log.sha256 = stand_in[1]
    elif re.search(r"^(import|from) \w", before, re.M):
        # A printed source ends in its own newline and in the one that print adds.
        log.source = before[:-1] if before.endswith("\n\n") else before
        log.sha256 = sha256(log.source)
    else:
        log.body = before + log.body  # a console's output
    parse_body(log)
    if not log.val and not log.train:
        cut = not match and re.search(r"^(import|from) \w", text, re.M)
        raise LedgerError(f"{path} has no training steps: "
                          + (log.error or "a script, or a log cut inside its source" * bool(cut)
                             or "give a log"))
    if log.error:
        log.notes.append(f"failed: {log.error}")
    if not log.finished and not any("stopped" in note for note in log.notes):
        log.notes.append(f"stopped at step {log.last_step} of {log.planned_steps}")
    return log


def parse_body(log: Log) -> None:
    """Read header, steps and final block from the text that follows the source."""
    *lines, rest = log.body.split("\n")
    if re.fullmatch(r"step:.* step_avg:[\d.]+ms", rest):
        lines.append(rest)
    elif rest:  # a number that was cut looks like a whole one
        log.notes.append(f"cut in the middle of a line ({rest[:40]!r}), which is not used")
    part, rules, devices = "header", 0, []
    for line in lines:
        if line == RULE:
            rules += 1
        elif line == "---":
            part, log.final = "final", {}
        elif re.match(r"(step:\d+/\d+|s:\d+) ", line):
            part = "steps"
            parse_step(log, line)
        elif line.startswith(("resumed at ", "stopped at ")):
            log.notes.append(line)
        elif line.startswith("error:"):
            log.error = line.removeprefix("error:").strip()
        elif found := re.match(r"peak memory (?:consumption|allocated): (\d+) MiB", line):
            log.final["peak_memory_mib"] = found[1]
        elif found := re.match(r"Running (pytorch|python) (\S+)", line, re.I):
            log.header["torch" if "torch" in found[1].lower() else "python"] = found[2]
        elif found := re.match(r"\|\s+\d+\s+(NVIDIA .*?)\s{2,}", line):  # nvidia-smi
            devices.append(found[1])
        elif part == "final" or (part == "header" and rules == 1):
            if found := re.fullmatch(r"(\w+): (.*)", line):
                (log.final if part == "final" else log.header)[found[1]] = found[2]
            elif part == "final":  # what a restart of a finished run adds
                part = "end"
    if devices:
        log.header |= {"device": f"{len(devices)}x {devices[0]}", "world_size": str(len(devices))}
    if "val_loss" in log.final:  # it went on, or the words stood in its sample of text
        log.error = None
        log.notes = [note for note in log.notes if not note.startswith("stopped at ")]


def parse_step(log: Log, line: str) -> None:
    """Read a `step:1/10 val_loss:…` or `s:1 tel:…` line; the last line of a step wins."""
    pairs = dict(pair.partition(":")[::2] for pair in line.split())
    try:
        number, _, planned = (pairs.get("step") or pairs["s"]).partition("/")
        step, ms = int(number), pairs.get("train_time")
        ms = float(ms.removesuffix("ms")) if ms else None
        val, train = (float(text) if text else None for text in (
            pairs.get("val_loss", pairs.get("tel")), pairs.get("train_loss", pairs.get("trl"))))
    except ValueError:
        log.notes.append(f"a step line that cannot be read: {line[:60]!r}")
        return
    if planned:
        log.planned_steps = int(planned)
    if "nan" in pairs.get("step_avg", ""):  # warm-up steps, before the clock is set to zero
        ms = None if step else 0.0
    if val is None:
        log.train[step] = (train, ms)
    else:
        log.val[step] = (val, ms)


def seed_files(folder: Path, prefix: str = "") -> list[Path]:
    """A record's `logs/<prefix>seed-N.txt`, by N."""
    found = (folder / "logs").glob(f"{prefix}seed-*.txt")
    return sorted(found, key=lambda path: (len(path.name), path.name))


def logs_of(operand: str | Path) -> list[Log]:
    """The log at a path, or all logs of a folder that have a validation loss."""
    path = Path(operand)
    if not path.is_dir():
        return [read_log(path)]
    logs, files = [], seed_files(path) or sorted({*path.rglob("*.txt"), *path.rglob("*.log")})
    for file in files:
        with contextlib.suppress(LedgerError):
            logs.append(read_log(file))
    logs = [log for log in logs if log.val]
    if not logs:
        raise LedgerError(f"{path} has no log with validation losses in {len(files)} .txt or .log "
                          "files; give a folder that has")
    if len(logs) < len(files):
        print(f"{path}: {len(files) - len(logs)} of {len(files)} files are not used: no log, or "
              "no validation loss in it", file=sys.stderr)
    return logs


# -----------------------------------------------------------------------------
# Sources
# -----------------------------------------------------------------------------


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def source_of(operand: str | Path) -> str:
    """The source of a folder, script or log. Raises LedgerError where there is none."""
    path = Path(operand)
    if path.is_dir():
        scripts = [p for p in [path / "train_gpt.py"] if p.exists()] or sorted(path.glob("*.py"))
        if len(scripts) == 1:
            return read_text(scripts[0])
    elif path.suffix == ".py":
        return read_text(path)
    sources = [log.source for log in logs_of(path) if log.source]
    if not sources:
        raise LedgerError(f"{path} has no source in it; give the script or another log")
    return sources[0]


def split_files(source: str) -> dict[str, str]:
    """The files that a public log joined, by name; the first has the name train_gpt.py."""
    rule = r"(?:# ?)?[-=#]{10,}\n"
    parts = re.split(rf"^{rule}#? ?([\w./-]+\.py)\n{rule}", source, flags=re.M)
    return dict(zip(["train_gpt.py", *parts[1::2]], parts[::2]))


def parse(source: str) -> ast.Module | None:
    """The syntax tree, or None where this Python cannot read the source."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return None


def statements(source: str) -> list[ast.stmt]:
    tree = parse(source)
    return tree.body if tree else []


def assignment(node: ast.stmt) -> tuple[str, ast.expr] | None:
    """(name, value) of `name = value` and `name: type = value`."""
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0]), node.value
    if isinstance(node, ast.AnnAssign) and node.value:
        return ast.unparse(node.target), node.value
    return None


def hyperparameters(source: str) -> dict[str, str]:
    """Field: value, both as written, of `class Hyperparameters` and, as preset.field, PRESETS."""
    found = {}
    for node in statements(split_files(source)["train_gpt.py"]):
        if isinstance(node, ast.ClassDef) and node.name == "Hyperparameters":
            fields = filter(None, map(assignment, node.body))
            found |= {name: ast.unparse(value) for name, value in fields}
        elif (pair := assignment(node)) and pair[0] == "PRESETS" and isinstance(pair[1], ast.Dict):
            for preset, call in zip(pair[1].keys, pair[1].values):
                for keyword in getattr(call, "keywords", ()):
                    found[f"{preset.value}.{keyword.arg}"] = ast.unparse(keyword.value)
    return found


def definitions(source: str) -> dict[str, str]:
    """Functions, classes, methods and constants of a source by name, free of its layout.

    Left out is what `hyperparameters` tells.
    """
    found = {}

    def add(nodes, prefix):
        rest = []
        for node in nodes:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found[prefix + node.name] = ast.dump(node)
            elif isinstance(node, ast.ClassDef):
                shell = list(map(ast.dump, (*node.decorator_list, *node.bases, *node.keywords)))
                attributes = add(node.body, f"{prefix}{node.name}.")
                found[prefix + node.name] = repr(
                    shell if node.name == "Hyperparameters" else shell + attributes)
            else:
                rest.append(ast.dump(node))
        return rest

    for file, text in split_files(source).items():
        prefix = "" if file == "train_gpt.py" else f"{file}: "
        nodes = statements(text)
        add(nodes, prefix)
        constants = dict(filter(None, map(assignment, nodes)))
        found |= {prefix + name: ast.dump(value) for name, value in constants.items()
                  if name != "PRESETS"}
    return found


def banners(lines: list[str]) -> dict[int, str]:
    """Index: title of each banner, `# ---- Title ---` or three lines (rule, title, rule)."""
    rule, found = re.compile(r"# ?-{20,}"), {}
    one_line = re.compile(r"# ?-{2,} (\w.*?)(?: \(the same in every record\))? -{3,}")
    for i, line in enumerate(lines):
        if title := one_line.fullmatch(line):
            found[i] = title[1]
        elif (rule.fullmatch(line) and len(lines) > i + 2 and rule.fullmatch(lines[i + 2])
              and re.fullmatch(r"# \w.*", lines[i + 1])):
            found[i] = lines[i + 1].removeprefix("# ")
    return found


def sections(source: str, by_banner: bool) -> dict[str, list[tuple[int, str]]]:
    """Title: its (line number, line)s, by banners or else by top-level functions and classes."""
    found, start = {}, 1
    for file, text in split_files(source).items():
        prefix = "" if file == "train_gpt.py" else f"{file}: "
        lines, nodes = text.removesuffix("\n").split("\n") if text else [], statements(text)
        owners, end = ["(module level)"] * len(lines), 0
        if by_banner:
            titles = banners(lines)
            for index in range(len(lines)):
                owners[index] = titles.get(index, owners[index - 1] if index else owners[0])
        else:
            for node in nodes:  # what stands above a definition belongs to it
                owner = getattr(node, "name", "(module level)")
                owners[end:node.end_lineno] = [owner] * (node.end_lineno - end)
                end = node.end_lineno
        if nodes and ast.get_docstring(ast.Module(nodes, [])) is not None:
            owners[:nodes[0].end_lineno] = ["Docstring"] * nodes[0].end_lineno
        for index, (owner, line) in enumerate(zip(owners, lines), start):
            found.setdefault(prefix + owner, []).append((index, line))
        start += len(lines) + 3  # the name of a joined file, between its rules
    return found


def diff_lines(a: list[tuple[int, str]], b: list[tuple[int, str]]) -> list[str]:
    """A unified diff of two sections, its hunks numbered by the lines of the files."""
    old, new, out = [line for _, line in a], [line for _, line in b], []
    for group in difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(3):
        (_, i1, _, j1, _), (_, _, i2, _, j2) = group[0], group[-1]
        spans = [f"{side[low][0] if low < high else 0},{high - low}"
                 for side, low, high in ((a, i1, i2), (b, j1, j2))]
        out.append(f"@@ -{spans[0]} +{spans[1]} @@")
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                out += [" " + line for line in old[i1:i2]]
            else:
                out += ["-" + line for line in old[i1:i2]] + ["+" + line for line in new[j1:j2]]
    return out


def diff_sources(a: str, b: str) -> dict:
    """What changed from source `a` to source `b`: a summary, and every section that differs."""
    by_banner = all(banners(split_files(source)["train_gpt.py"].split("\n")) for source in (a, b))
    before, after = sections(a, by_banner), sections(b, by_banner)
    changed = []
    for title in after | before:
        if lines := diff_lines(before.get(title, []), after.get(title, [])):
            signs = [line[0] for line in lines]
            changed.append({"title": title, "added": signs.count("+"),
                            "removed": signs.count("-"), "lines": lines})
    (old_fields, fields), (old, new) = map(hyperparameters, (a, b)), map(definitions, (a, b))
    return {
        "added": sum(section["added"] for section in changed),
        "removed": sum(section["removed"] for section in changed),
        "hyperparameters": [{"name": name, "a": old_fields.get(name), "b": fields.get(name)}
                            for name in old_fields | fields
                            if old_fields.get(name) != fields.get(name)],
        "definitions": {"changed": [n for n in new if n in old and new[n] != old[n]],
                        "added": [n for n in new if n not in old],
                        "removed": [n for n in old if n not in new]},
        "sections": changed,
        "sections_in_all": len(after | before),
        "notes": [f"{side}: this Python cannot parse it, so it has no list of names"
                  for side, source in (("A", a), ("B", b))
                  if None in map(parse, split_files(source).values())],
    }


HTML_STYLE = """
:root { color-scheme: light dark; --fg: #1b1f24; --bg: #fff; --soft: #f3f5f7; --line: #d5dae0;
  --dim: #5b6570; --add: #0b5394; --add-bg: #e3effb; --del: #9c4200; --del-bg: #fdeee0; }
@media (prefers-color-scheme: dark) { :root { --fg: #e4e8ec; --bg: #14171a; --soft: #1d2125;
  --line: #343a40; --dim: #98a2ac; --add: #86bdf5; --add-bg: #14304c; --del: #f5b183;
  --del-bg: #45260f; } }
body { margin: 2.5rem auto; max-width: 64rem; padding: 0 1.2rem; color: var(--fg);
  background: var(--bg); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.3; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
code, pre { font: 13px/1.5 ui-monospace, Menlo, Consolas, monospace; }
table { border-collapse: collapse; } td, th { padding: .25rem 1.2rem .25rem 0; text-align: left;
  border-bottom: 1px solid var(--line); vertical-align: top; } th { color: var(--dim); }
.add { color: var(--add); } .del { color: var(--del); } .dim { color: var(--dim); }
details { border: 1px solid var(--line); border-radius: 8px; margin: .8rem 0; overflow: hidden; }
summary { cursor: pointer; padding: .5rem .9rem; background: var(--soft); font-weight: 600; }
summary span { font-weight: 400; margin-left: .6rem; }
pre { margin: 0; padding: .5rem 0; overflow-x: auto; }
pre div { padding: 0 .9rem; min-width: max-content; min-height: 1.5em; }
pre .add { background: var(--add-bg); } pre .del { background: var(--del-bg); }
"""


def diff_html(diff: dict, a: str, b: str) -> str:
    """The diff as a page that needs nothing else and follows the reader's light or dark theme."""
    esc, heading = html.escape, f"{html.escape(a)} → {html.escape(b)}"
    count = '<span class="add">+{added}</span> <span class="del">−{removed}</span>'
    kinds = {"+": "add", "-": "del", "@": "dim", " ": ""}
    rows = [f"<tr><td><code>{esc(h['name'])}</code><td class=del><code>{esc(h['a'] or '–')}</code>"
            f"<td class=add><code>{esc(h['b'] or '–')}</code>" for h in diff["hyperparameters"]]
    names = [f"<tr><th>{kind}<td><code>{'<br>'.join(map(esc, found))}</code>"
             for kind, found in diff["definitions"].items() if found]
    page = [f"<!doctype html>\n<html lang=en><meta charset=utf-8><title>{heading}</title>",
            "<meta name=viewport content='width=device-width'>", f"<style>{HTML_STYLE}</style>",
            f"<h1>{heading}</h1><p>{count.format(**diff)} lines in {len(diff['sections'])} of "
            f"{diff['sections_in_all']} sections</p>",
            *(f"<p class=dim>{esc(note)}</p>" for note in diff["notes"])]
    if rows:
        page += ["<h2>Hyperparameters</h2><table><tr><th>field<th>A<th>B", *rows, "</table>"]
    if names:
        page += ["<h2>Functions, classes and constants</h2><table>", *names, "</table>"]
    page.append("<h2>Sections</h2>")
    for section in diff["sections"]:
        lines = [f"<div class='{kinds[line[0]]}'>{esc(line)}</div>" for line in section["lines"]]
        title = f"{esc(section['title'])}{count.format(**section)}"
        page += [f"<details open><summary>{title}</summary><pre>", *lines, "</pre></details>"]
    return "".join(page) + "</html>\n"


# -----------------------------------------------------------------------------
# Statistics
# -----------------------------------------------------------------------------


def scipy_stats():
    try:
        from scipy import stats
    except ImportError:
        raise LedgerError("p-values need scipy: pip install -r requirements-dev.txt") from None
    return stats


def p_below(losses: list[float], target: float) -> float | None:
    """One-sided t-test that the mean lies below `target`, to three digits; None without spread."""
    if len(losses) < 2 or statistics.stdev(losses) == 0:
        return None
    return float(f"{scipy_stats().ttest_1samp(losses, target, alternative='less').pvalue:.3g}")


def p_differs(a: list[float], b: list[float]) -> float | None:
    """Welch's two-sided t-test that two means differ, to three digits; None without spread."""
    if min(len(a), len(b)) < 2 or statistics.stdev(a) == statistics.stdev(b) == 0:
        return None
    return float(f"{scipy_stats().ttest_ind(a, b, equal_var=False).pvalue:.3g}")


def summarize(runs: list[dict]) -> dict:
    """n, mean and standard deviation (n - 1) of the runs' losses; the median of their times."""
    losses = [run["val_loss"] for run in runs]
    return {
        "n": len(runs),
        "val_loss_mean": round(statistics.fmean(losses), 6),
        "val_loss_std": round(statistics.stdev(losses), 6) if len(losses) > 1 else None,
        "train_time_ms_median": statistics.median(run["train_time_ms"] for run in runs),
    }


def compare(runs: list[dict], parent_runs: list[dict]) -> dict:
    """Runs against a parent's: difference of means, Welch's p, ratio of times seed by seed."""
    theirs = {run["seed"]: run["train_time_ms"] for run in parent_runs}
    ratios = [run["train_time_ms"] / theirs[run["seed"]] for run in runs if theirs.get(run["seed"])]
    losses, parent_losses = ([run["val_loss"] for run in group] for group in (runs, parent_runs))
    measures = {"median": statistics.median, "min": min, "max": max}
    return {
        **summarize(parent_runs),
        "difference": round(statistics.fmean(losses) - statistics.fmean(parent_losses), 6),
        "p_differs": p_differs(losses, parent_losses),
        **{f"time_ratio_{name}": round(measure(ratios), 4) if ratios else None
           for name, measure in measures.items()},
    }


# -----------------------------------------------------------------------------
# Records
# -----------------------------------------------------------------------------


@dataclass
class Record:
    """A record folder and what its record.json says."""

    folder: Path
    claim: dict
    measured: dict | None

    @property
    def date(self) -> str:
        return self.folder.name.partition("_")[0]

    @property
    def name(self) -> str:
        return self.folder.name.partition("_")[2]


def read_record(folder: Path) -> Record:
    """The record of a folder; its claim is empty where there is no record.json yet."""
    path, empty = folder / "record.json", dict.fromkeys(CLAIM)
    if not path.exists():
        return Record(folder, empty, None)
    try:
        content = json.loads(read_text(path))
        return Record(folder, empty | content["claim"], content.get("measured"))
    except (ValueError, KeyError, TypeError) as error:
        raise LedgerError(f"{path} is no record.json: {error!r}; see records/README.md") from None


def find_records(folder: Path) -> list[Record]:
    """The records of a folder of records, oldest first."""
    if not folder.is_dir():
        raise LedgerError(f"{folder}: no such folder; give records/ or one record's folder")
    records = [read_record(path.parent) for path in folder.glob("*/record.json")]
    return sorted(records, key=lambda record: (record.date, record.claim["number"] or 0))


def shown_records(folder: Path) -> list[Record]:
    """`find_records`, all of them fit to be shown. Raises LedgerError where one is not."""
    records = find_records(folder)
    for record in records:
        try:
            record_row(record), record_region(record)
        except (KeyError, TypeError, ValueError) as error:
            raise LedgerError(f"{record.folder / 'record.json'} cannot be shown: {error!r}; "
                              "`verify` says what is wrong in it") from None
    return records


def run_facts(path: Path) -> dict:
    """What record.json keeps of one finished run. Raises LedgerError where it is not finished."""
    log = read_log(path)
    if not log.finished:
        raise LedgerError(f"{path} is not a finished run: {'; '.join(log.notes)}")
    step, ms = log.reach(log.target) or (None, None)
    try:
        return {
            "seed": int(log.final["seed"]),
            "log": path.name,
            "val_loss": round(float(log.final["val_loss"]), 6),
            **{name: int(log.final[name]) for name in
               ("train_time_ms", "steps", "tokens", "parameters", "peak_memory_mib")},
            "target_step": step,
            "target_time_ms": ms,
        }
    except (KeyError, ValueError) as error:
        raise LedgerError(f"{path}: no usable {error} in its final block") from None


def measure(record: Record) -> dict:
    """record.json's measured block, from the logs and scripts in the folders alone."""
    files, parent_files = seed_files(record.folder), seed_files(record.folder, "parent-")
    if not files:
        raise LedgerError(f"{record.folder / 'logs'} has no seed-N.txt; measure with `run`")
    runs, parent_runs = list(map(run_facts, files)), list(map(run_facts, parent_files))
    log, script = read_log(files[0]), read_text(record.folder / "train_gpt.py")
    reached = [run["target_time_ms"] for run in runs if run["target_step"] is not None]
    lines = None
    if record.claim["parent"]:
        diff = diff_sources(source_of(record.folder.parent / record.claim["parent"]), script)
        lines = {"added": diff["added"], "removed": diff["removed"]}
    return {
        "script_sha256": sha256(script),
        **{name: log.header.get(name) for name in SAME},
        **{name: runs[0][name] for name in ("steps", "tokens", "parameters")},
        "peak_memory_mib": max(run["peak_memory_mib"] for run in runs),
        **summarize(runs),
        "target": log.target,
        "p_target": p_below([run["val_loss"] for run in runs], log.target),
        "reached_target": len(reached),
        "target_time_ms_median": statistics.median(reached) if reached else None,
        "lines": lines,
        "runs": runs,
        "parent": {**compare(runs, parent_runs), "runs": parent_runs} if parent_runs else None,
    }


def write_file(path: Path, text: str) -> None:
    """Replace a file in one step, so that neither reader nor crash finds half of it."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8", newline="")
    os.replace(temporary, path)


# -----------------------------------------------------------------------------
# Tables
# -----------------------------------------------------------------------------

COLUMNS = ("#", "Date", "Record", "Change", "Published", "Loss", "Pocket loss ± std (n)", "Time",
           "To target", "Loss against parent", "Time against parent", "Lines")


def decimal(value: float | None, digits: int = 4, sign: str = "") -> str:
    return "–" if value is None else f"{value:{sign}.{digits}f}".replace("-", "−")


def p_words(p: float | None) -> str:
    return "no p" if p is None else f"p = {p:.2g}"


def duration(ms: float | None) -> str:
    return "–" if ms is None else f"{ms / 1000:.2f} s" if ms < 600_000 else f"{ms / 60_000:.2f} min"


def lines_words(lines: dict | None) -> str:
    return f"+{lines['added']} −{lines['removed']}" if lines else "–"


def parent_words(parent: dict | None) -> str:
    """The difference from the parent: the number, its p-value, and no more than they say."""
    if parent is None:
        return "–"
    p, difference = parent["p_differs"], parent["difference"]
    shown = p is not None and p < SIGNIFICANCE
    verdict = ("better" if difference < 0 else "worse") if shown else "no difference shown"
    return f"{decimal(difference, sign='+')}, {p_words(p)}: {verdict}"


def ratio_words(parent: dict) -> str:
    ratios = (decimal(parent[f"time_ratio_{name}"], 3) for name in ("median", "min", "max"))
    return "×{} in the median, {} to {}".format(*ratios)


def target_words(measured: dict) -> str:
    """Median time to the target, over how many of the seeds."""
    reached, n = measured["reached_target"], measured["n"]
    share = f" ({reached} of {n} seeds)" if reached < n else ""
    return duration(measured["target_time_ms_median"]) + share if reached else "not reached"


def record_row(record: Record) -> list[str]:
    """One row of the table, as COLUMNS."""
    claim, measured, published = record.claim, record.measured, record.claim["published"] or {}
    minutes, cells = published.get("minutes"), ["–"] * 6
    if measured:
        ratio = (measured["parent"] or {}).get("time_ratio_median")
        cells = [f"{decimal(measured['val_loss_mean'])} ± {decimal(measured['val_loss_std'])} "
                 f"({measured['n']})", duration(measured["train_time_ms_median"]),
                 target_words(measured), parent_words(measured["parent"]),
                 f"×{ratio:.3f}" if ratio else "–", lines_words(measured["lines"])]
    return [str(claim["number"] or "–"), record.date, record.name, claim["change"] or "–",
            f"{minutes:g} min" if minutes else "–", decimal(published.get("val_loss")), *cells]


def foreign_rows(folder: Path) -> list[list[str]]:
    """Rows, as COLUMNS, of a folder of log folders that this project did not write."""
    rows, previous = [], None
    for path in sorted(path for path in folder.iterdir() if path.is_dir()):
        try:
            logs = logs_of(path)
        except LedgerError:
            continue
        source = next((log.source for log in logs if log.source), None)
        lines = diff_sources(previous, source) if source and previous else None
        previous, (date, _, name) = source or previous, path.name.partition("_")
        losses, times = [log.val_loss for log in logs], [log.train_time_ms for log in logs]
        std = statistics.stdev(losses) if len(losses) > 1 else None
        rows.append(["–", date, name or date, "–", "–", "–",
                     f"{decimal(statistics.fmean(losses))} ± {decimal(std)} ({len(losses)})",
                     duration(None if None in times else statistics.median(times)),
                     "–", "–", "–", lines_words(lines)])
    return rows


def markdown(header: tuple, rows: list) -> str:
    cells = [[c.replace("|", r"\|") for c in row] for row in (header, ["---"] * len(header), *rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def print_table(header: tuple, rows: list) -> None:
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    for row in (header, ["-" * width for width in widths], *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def print_json(value) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def table_region(records: list[Record]) -> str:
    """The generated part of records/README.md."""
    rows = [(*row[:2], f"[{row[2]}]({record.folder.name})", *row[3:])
            for record, row in zip(records, map(record_row, records))]
    return markdown(COLUMNS, rows) if rows else "No records yet."


def record_region(record: Record) -> str:
    """The generated part of a record's README.md: what was published, measured, and with what."""
    m, published, claim = record.measured, record.claim["published"], record.claim
    if m is None:
        return "Not measured yet."
    rows = [(str(run["seed"]), f"{run['val_loss']:.6f}", duration(run["train_time_ms"]),
             "–" if run["target_step"] is None
             else f"{duration(run['target_time_ms'])}, step {run['target_step']}")
            for run in m["runs"]]
    parts = [
        f"Measured with `--preset {m['preset']}`: {m['steps']:,} steps, {m['tokens']:,} tokens, "
        f"{m['parameters']:,} parameters; torch {m['torch']}, world size {m['world_size']}, "
        f"{m['threads']} threads, {m['device']}; peak memory {m['peak_memory_mib']:,} MiB.",
        markdown(("Seed", "Validation loss", "Training time", f"To {m['target']:g}"), rows),
        f"Mean {decimal(m['val_loss_mean'])}, standard deviation {decimal(m['val_loss_std'])}, "
        f"n = {m['n']}; that the mean lies below {m['target']:g}: {p_words(m['p_target'])}. "
        f"Time to the target: {target_words(m)}.",
    ]
    if published:
        parts.insert(0, f"Published as #{published['number']}: {published['minutes']:g} minutes, "
                        f"validation loss {published['val_loss']} on {published['hardware']} "
                        f"({published['source']}).")
    if parent := m["parent"]:
        parts.append(
            f"Against {claim['parent']}, run in turns (mean {decimal(parent['val_loss_mean'])}, "
            f"standard deviation {decimal(parent['val_loss_std'])}, n = {parent['n']}): "
            f"{parent_words(parent)}. Time {ratio_words(parent)}.")
    if m["lines"]:
        parts.append(f"Source: {lines_words(m['lines'])} lines against {claim['parent']}.")
    return "\n\n".join(parts)


def split_region(path: Path) -> tuple[str, str, str]:
    """A README's text before, in and after its generated part. Raises LedgerError without one."""
    match = re.fullmatch(rf"(.*{REGION[0]}\n)(.*?)(\n{REGION[1]}.*)", read_text(path), re.S)
    if not match:
        raise LedgerError(f"{path} has no lines {REGION[0]} and {REGION[1]}; add them")
    return match.groups()


# -----------------------------------------------------------------------------
# Verification
# -----------------------------------------------------------------------------


def flatten(value, path: str = "") -> dict[str, object]:
    """Leaves of nested dicts and lists by dotted path."""
    if not isinstance(value, (dict, list)) or not value:
        return {path: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {leaf: v for key, item in items for leaf, v in flatten(item, f"{path}.{key}").items()}


def claim_findings(claim: dict) -> list[str]:
    found = [f"claim.{name} is {claim[name]!r}, not a usable value"
             for name, kind in CLAIM.items() if not isinstance(claim[name], kind)]
    found += [f"claim.{name} is not a field of a claim" for name in claim if name not in CLAIM]
    return found + [f"claim.published.{name} is missing or of another kind"
                    for name, kind in PUBLISHED.items() if isinstance(claim["published"], dict)
                    and not isinstance(claim["published"].get(name), kind)]


def log_findings(path: Path, script: str, whole: bool) -> list[str]:
    """What is wrong with one log by itself, and against the script it should come from."""
    try:
        run_facts(path)
        log = read_log(path)
    except LedgerError as error:
        return [str(error)]
    found, final = [], log.final
    if whole and log.source is None:
        found.append("has no source; the first seed's log is kept whole")
    if log.sha256 != sha256(script):
        found.append("was not written by this train_gpt.py: the sources differ")
    loss, ms = log.val[log.last_step]
    # The step's line rounds further: by half its last digit, and the clock's last millisecond.
    for name, shown, slack in (("val_loss", loss, 5.06e-5), ("train_time_ms", ms, 1),
                               ("steps", log.last_step, 0)):
        if abs(float(final[name]) - shown) > slack:
            found.append(f"its final {name} is {final[name]}, its last step says {shown:g}")
    found += [f"its final {name} is {final[name]}, its header says {log.header.get(name)}"
              for name in (*SAME, "seed") if final.get(name, "") not in ("", log.header.get(name))]
    if any(note.startswith("resumed") for note in log.notes):
        found.append("is a resumed run, whose time is not a measurement")
    return [f"logs/{path.name}: {text}" for text in found]


def record_findings(record: Record) -> list[str]:
    """Every claim of a record that its files do not bear, one line each."""
    folder, claim, found = record.folder, record.claim, claim_findings(record.claim)
    if found:
        return found
    try:
        datetime.date.fromisoformat(record.date if FOLDER_NAME.fullmatch(folder.name) else "")
    except ValueError:
        found.append("the folder's name is not a date and a name, YYYY-MM-DD_Name")
    scripts = {"": folder / "train_gpt.py"}
    if claim["parent"]:
        scripts["parent-"] = folder.parent / claim["parent"] / "train_gpt.py"
        if claim["parent"] >= folder.name:
            found.append(f"its parent {claim['parent']} is not older")
    found += [f"{path.parent.name}/{path.name} is missing"
              for path in (*scripts.values(), folder / "README.md") if not path.is_file()]
    if record.measured is None:
        found.append("record.json has no measured block: use `run`")
    if found:
        return found
    settings = []
    for prefix, path in scripts.items():
        files, script, headers = seed_files(folder, prefix), read_text(path), []
        for index, file in enumerate(files):
            found += log_findings(file, script, whole=not prefix and index == 0)
            with contextlib.suppress(LedgerError):  # it is among the findings
                headers.append(read_log(file).header)
        claimed = (record.measured.get("parent") or {}) if prefix else record.measured
        missing = {run["log"] for run in claimed.get("runs", [])} - {file.name for file in files}
        found += [f"logs/{name} is claimed and missing" for name in sorted(missing)]
        seeds = [header.get("seed") for header in headers]
        found += [f"logs/{prefix}seed-*.txt has seed {seed} twice"
                  for seed in sorted(set(seeds)) if seeds.count(seed) > 1]
        found += [f"logs/{prefix}seed-*.txt differ in {name}" for name in dict(*headers[:1])
                  if name not in ("seed", "run_id") and len({h.get(name) for h in headers}) > 1]
        settings += headers[:1]
    for ours, theirs in zip(settings, settings[1:]):
        found += [f"its parent was run with another {name}: {theirs.get(name)}" for name in SAME
                  if theirs.get(name) != ours.get(name)]
    try:
        true = Record(folder, claim, measure(record))
        said, shown = flatten(record.measured), flatten(true.measured)
    except LedgerError as error:
        return found + [f"its logs cannot be measured: {error}"]
    pairs = {key: (said.get(key, "missing"), shown.get(key, "nothing")) for key in said | shown}
    found += [f"measured{key} is {claims}, the logs say {logs}"
              for key, (claims, logs) in pairs.items() if claims != logs]
    p = true.measured["p_target"]
    if claim["meets_target"] and (p is None or p >= SIGNIFICANCE):
        found.append(f"it claims to meet the target, with {p_words(p)}, not below {SIGNIFICANCE}")
    return found + region_findings(folder / "README.md", record_region(true))


def region_findings(path: Path, wanted: str) -> list[str]:
    """Whether a README's generated part is what the records give."""
    try:
        lines = split_region(path)[1].split("\n")
    except LedgerError as error:
        return [str(error)]
    pairs = itertools.zip_longest(lines, wanted.split("\n"))
    return [f"{path.name} is not what `list --write` gives: {str(old)[:60]!r}"
            for old, new in pairs if old != new][:1]


def verify(folder: Path) -> tuple[list[str], int]:
    """(findings, number of records) of one record's folder or of a folder of records."""
    if (folder / "record.json").exists() or FOLDER_NAME.fullmatch(folder.name):
        return [f"{folder.name}: {text}" for text in record_findings(read_record(folder))], 1
    records = find_records(folder)
    found = [f"{record.folder.name}: {text}"
             for record in records for text in record_findings(record)]
    found += [f"{path.name}: record.json is missing; `run` writes it" for path in folder.iterdir()
              if FOLDER_NAME.fullmatch(path.name) and not (path / "record.json").exists()]
    if records:
        numbers = [n for record in records if isinstance(n := record.claim["number"], int)]
        if numbers != sorted(set(numbers)):
            found.append(f"the records' numbers {numbers} do not rise with their dates")
        root, newest = folder.parent / "train_gpt.py", records[-1].folder / "train_gpt.py"
        if [root.is_file() and root.read_bytes()] != [newest.is_file() and newest.read_bytes()]:
            found.append(f"{newest.parent.name}: train_gpt.py is not the root's, byte for byte")
        with contextlib.suppress(KeyError, TypeError, ValueError):  # the record's own findings
            found += region_findings(folder / "README.md", table_region(records))
    return found, len(records)


# -----------------------------------------------------------------------------
# Runs
# -----------------------------------------------------------------------------


@dataclass
class Contestant:
    """A script that `run` measures, and the logs of its runs."""

    name: str
    script: Path
    folder: Path | None  # its record folder, where it is in one
    logs: list[Path] = field(default_factory=list)

    @classmethod
    def of(cls, operand: str) -> "Contestant":
        path = Path(operand).resolve()
        script = path / "train_gpt.py" if path.is_dir() else path
        if script.suffix != ".py" or not script.is_file():
            raise LedgerError(f"{operand}: no script there; give a record folder or a .py file")
        is_record = path.is_dir() and FOLDER_NAME.fullmatch(path.name)
        return cls(re.sub(r"[^\w.-]", "_", path.stem), script, path if is_record else None)

    def next_log(self, out: Path, seed: int) -> tuple[Path, bool]:
        """Where a run's log goes, and whether a finished run of this script is there already."""
        for attempt in itertools.count(1):
            suffix = f"-{attempt}" if attempt > 1 else ""
            path = out / "logs" / f"{self.name}-seed-{seed}{suffix}" / "log.txt"
            if not path.parent.exists():
                return path, False
            with contextlib.suppress(LedgerError):
                log = read_log(path)
                if log.finished and log.sha256 == sha256(read_text(self.script)):
                    return path, True


class Progress:
    """A line for each finished run on standard error, and on a terminal a live line between."""

    def __init__(self):
        self.done, self.started, self.live = 0, time.monotonic(), sys.stderr.isatty()

    def time_left(self, done: float, runs: int) -> str:
        left = (time.monotonic() - self.started) / done * (self.done + runs - done) if done else 0
        return f"{left // 60:.0f}:{left % 60:02.0f} left" if done else ""

    def show(self, text: str, share: float, runs: int) -> None:
        if self.live:
            left = self.time_left(self.done + share, runs)
            print(f"\r\x1b[2K{text}  {left}", end="", file=sys.stderr, flush=True)

    def finish(self, text: str, runs: int) -> None:
        self.done += 1
        end = "\r\x1b[2K" if self.live else ""
        print(f"{end}{text}, {self.time_left(self.done, runs - 1)}", file=sys.stderr)


def train_once(command: list[str], cwd: Path, log: Path, show) -> str | None:
    """Run one training to its end, calling `show(share)`; None, or what went wrong."""
    with tempfile.TemporaryFile("w+", errors="replace") as console:
        process = subprocess.Popen(command, cwd=cwd, stdout=console, stderr=subprocess.STDOUT)
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
                    break
                steps = log.exists() and re.findall(rb"^step:(\d+)/(\d+)", log.read_bytes(), re.M)
                show(int(steps[-1][0]) / max(int(steps[-1][1]), 1) if steps else 0)
        except KeyboardInterrupt:
            process.terminate()  # the script stops at its next step and says so in its log
            process.wait()
            raise
        console.seek(0)
        last = (console.read().strip() or "nothing").splitlines()[-1]
    if process.returncode:
        return f"exit status {process.returncode}, its last words: {last[:200]}"
    try:
        parsed = read_log(log)
    except LedgerError as error:
        return str(error)
    return None if parsed.finished else "; ".join(parsed.notes)


def run_all(contestants: list[Contestant], args: argparse.Namespace) -> None:
    """Run every seed of every contestant in turns, and fill in `logs` of each."""
    out = Path(args.out or f"logs/ledger-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    settings = json.dumps({"preset": args.preset, "nproc": args.nproc, "args": args.script_args})
    out.mkdir(parents=True, exist_ok=True)
    kept = out / "settings.json"
    if kept.exists() and read_text(kept) != settings:
        raise LedgerError(f"--out {args.out} has runs with {read_text(kept)}; give another folder")
    write_file(kept, settings)
    launcher = [sys.executable]
    if args.nproc > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone"]
        launcher.append(f"--nproc-per-node={args.nproc}")
    print(f"runs are kept in {out}; --out {out} goes on with them", file=sys.stderr)
    total, progress = args.seeds * len(contestants), Progress()
    turns = itertools.product(range(args.seeds), contestants)
    for index, (seed, contestant) in enumerate(turns):
        what, runs = f"[{index + 1}/{total}] {contestant.name} seed {seed}", total - index
        path, reused = contestant.next_log(out, seed)
        contestant.logs.append(path)
        if reused:
            print(f"{what}: used as it was", file=sys.stderr)
            continue
        flags = ["--preset", args.preset, "--seed", str(seed), "--run_id", path.parent.name]
        command = [*launcher, str(contestant.script), *flags, *args.script_args]
        try:
            trouble = train_once(command, out, path, lambda share, what=what, runs=runs:
                                 progress.show(f"{what} {share:4.0%}", share, runs))
        except KeyboardInterrupt:
            trouble = "stopped"
        if trouble:
            raise RunError(f"{what}: {trouble}; what is done is kept, go on with --out {out}")
        log = read_log(path)
        progress.finish(f"{what}: {log.val_loss:.4f} in {duration(log.train_time_ms)}", runs)


def keep_logs(folder: Path, prefix: str, logs: list[Path]) -> None:
    """Copy runs' logs to logs/<prefix>seed-N.txt: the record's first with its source."""
    (folder / "logs").mkdir(exist_ok=True)
    stale = set(seed_files(folder, prefix))
    for index, path in enumerate(logs):
        log, text = read_log(path), read_text(path)
        kept = folder / "logs" / f"{prefix}seed-{int(log.final['seed'])}.txt"
        whole = index == 0 and not prefix
        write_file(kept, text if whole else f"source sha256: {log.sha256}\n{log.body}")
        stale.discard(kept)
    for path in stale:
        path.unlink()


def write_measurements(contestants: list[Contestant]) -> None:
    """Keep the logs and write the measured block of each record that this run measured."""
    by_folder = {c.folder.name: c for c in contestants if c.folder}
    for name, contestant in by_folder.items():
        record = read_record(contestant.folder)
        parent = by_folder.get(record.claim["parent"])
        if not parent and record.measured and record.measured["parent"]:
            print(f"{name}: kept as it was measured beside its parent", file=sys.stderr)
            continue
        keep_logs(record.folder, "", contestant.logs)
        keep_logs(record.folder, "parent-", parent.logs if parent else [])
        content = {"claim": record.claim, "measured": measure(record)}
        write_file(record.folder / "record.json", json.dumps(content, indent=2) + "\n")
        todo = ", ".join(key for key in claim_findings(record.claim)) or "`list --write` is next"
        print(f"{name}: wrote record.json; {todo}", file=sys.stderr)


# -----------------------------------------------------------------------------
# Pictures
# -----------------------------------------------------------------------------

# Okabe and Ito's colours, told apart by all kinds of sight; line styles tell them apart in grey.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", (0, (5, 1.5)), (0, (1.5, 1)), (0, (6, 1.5, 1.5, 1.5)))
GREY = "#4a525a"
DASHED = {"color": GREY, "linewidth": 1.4, "linestyle": (0, (2, 2)), "zorder": 1}


def pyplot():
    try:
        import matplotlib
    except ImportError:
        raise LedgerError("pictures need matplotlib: pip install -r requirements-dev.txt") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 13, "axes.spines.top": False, "axes.spines.right": False,
                         "axes.grid": True, "grid.color": "#e3e6e9", "axes.edgecolor": "#7b848d",
                         "axes.axisbelow": True, "legend.frameon": False})
    return plt


def save_picture(figure, png: str) -> None:
    figure.savefig(png, format="png", dpi=160, metadata={"Software": None})
    print(f"wrote {png}", file=sys.stderr)


def unit_of(top: float, *units: tuple[float, str]) -> tuple[float, str]:
    """The first (size, name) that `top` is at least twice, or the last."""
    return next((unit for unit in units if top >= 2 * unit[0]), units[-1])


def trained_steps(logs: list[Log]) -> list[int]:
    """Steps that all logs validated at, without the untrained model where there are others."""
    steps = sorted(set.intersection(*(set(log.val) for log in logs)))
    if not steps:
        raise LedgerError(f"{logs[0].path.parent}: its logs share no step of validation; give "
                          "them one by one")
    return [step for step in steps if step] or steps


def common_losses(logs: list[Log], target: float) -> list[float]:
    """Some seven round losses between the first validation and the best, and the target."""
    curves = [[log.val[step][0] for step in trained_steps([log])] for log in logs]
    high, low = max(curve[0] for curve in curves), max(target, min(map(min, curves)))
    if high <= low:
        return [target]
    power = 10 ** math.floor(math.log10((high - low) / 7))
    step = next(n * power for n in (1, 2, 2.5, 5, 10) if n * power >= (high - low) / 7.01)
    rounds = [round(step * i, 6) for i in range(math.ceil(low / step), int(high / step) + 1)]
    return sorted({target, *rounds}, reverse=True)


def draw_curves(groups: dict[str, list[Log]], target: float, png: str) -> None:
    """Validation loss over steps, tokens and training time; a folder's seeds as mean and range."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(15, 5), sharey=True)
    logs = [log for group in groups.values() for log in group]
    per_token, token_unit = unit_of(max(log.last_step * (log.tokens_per_step or 0) for log in logs),
                                    (1e9, "billions"), (1e6, "millions"), (1e3, "thousands"))
    per_ms, time_unit = unit_of(max(ms or 0 for log in logs for _, ms in log.val.values()),
                                (60_000, "minutes"), (1000, "seconds"))
    labels = ("steps", f"training tokens ({token_unit})", f"training time ({time_unit})")
    axes[0].axhline(target, label=f"target {target:g}", **DASHED)
    tops, bottoms = [], [target]
    for (name, group), color, style in zip(groups.items(), itertools.cycle(COLORS),
                                           itertools.cycle(STYLES)):
        steps = trained_steps(group)
        losses = [[log.val[step][0] for log in group] for step in steps]
        times = [[log.val[step][1] for log in group] for step in steps]
        mean, tokens = list(map(statistics.fmean, losses)), group[0].tokens_per_step
        panels = (steps, tokens and [step * tokens / per_token for step in steps],
                  None if None in sum(times, []) else [statistics.fmean(t) / per_ms for t in times])
        label = f"{name}: {mean[-1]:.4f}" + f" (mean of {len(group)})" * (len(group) > 1)
        for axis, x, what in zip(axes, panels, labels):
            if x is None:
                print(f"{name} has no {what.split(' (')[0]}, so it is not in that panel",
                      file=sys.stderr)
                continue
            axis.plot(x, mean, color=color, linestyle=style, linewidth=2.4, label=label)
            axis.plot(x[-1], mean[-1], "o", color=color, markersize=7)
            axis.fill_between(x, [*map(min, losses)], [*map(max, losses)], color=color, alpha=0.2,
                              linewidth=0)
        tops.append(mean[0])
        bottoms.append(min(mean))
    margin = max(max(tops) - min(bottoms), 0.01) * 0.06
    for axis, label in zip(axes, labels):
        axis.axhline(target, **DASHED)
        axis.tick_params(left=False)
        axis.set(xlabel=label, xlim=(0, None), ylim=(min(bottoms) - margin, max(tops) + margin))
    axes[0].set_ylabel("validation loss (nats per token)")
    handles, names = axes[0].get_legend_handles_labels()
    columns = max(1, min(len(names), 130 // (max(map(len, names)) + 8)))
    figure.legend(handles, names, loc="upper center", ncols=columns, handlelength=3)
    inches = 0.3 * math.ceil(len(names) / columns) + 0.15  # of the legend
    figure.set_figheight(5 + inches)
    figure.tight_layout(rect=(0, 0, 1, 5 / (5 + inches)))
    save_picture(figure, png)


def draw_lineage(records: list[Record], png: str) -> None:
    """The ladder: published minutes on 8×H100 beside pocket loss and time measured here."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(15, 1.8 + 0.75 * len(records)), sharey=True,
                                width_ratios=(1.25, 1, 1))
    for y, record in enumerate(records):
        published, measured = record.claim["published"], record.measured
        if published:
            axes[0].barh(y, published["minutes"], height=0.55, color=COLORS[0])
            axes[0].annotate(f" {published['minutes']:g} min, loss {published['val_loss']:.4f}",
                             (published["minutes"], y), va="center")
        else:
            axes[0].annotate(" not published", (0, y), va="center", color=GREY)
        for axis, color, key, size, digits, middle in (
                (axes[1], COLORS[1], "val_loss", 1, 4, statistics.fmean),
                (axes[2], COLORS[2], "train_time_ms", 1000, 2, statistics.median)):
            values = [run[key] / size for run in measured["runs"]] if measured else []
            axis.plot(values, [y] * len(values), "o", color=color, alpha=0.35, markersize=6)
            for x in [middle(values)] if values else []:
                axis.plot(x, y, "D", color=color, markersize=9)
                axis.annotate(f"{x:.{digits}f}", (x, y), (0, 9), textcoords="offset points",
                              ha="center", fontsize=11.5)
    for target in {record.measured["target"] for record in records if record.measured}:
        axes[1].axvline(target, **DASHED)
        axes[1].annotate(f"target {target:g}", (target, 1.01), ha="center",
                         xycoords=("data", "axes fraction"), color=GREY)
    names = [f"{record.claim['number']}  {record.name}\n{record.date}" for record in records]
    axes[0].set(yticks=range(len(records)), yticklabels=names, ylim=(len(records) - 0.4, -0.7),
                xlabel="published: minutes on 8×H100")
    axes[1].set_xlabel("measured here: pocket loss\n(nats per token; dots: seeds, diamond: mean)")
    axes[2].set_xlabel("measured here: pocket training time\n(s; dots: seeds, diamond: median)")
    for axis, room, start in zip(axes, (1.55, None, 1.1), (0, None, 0)):  # room for the words
        axis.margins(x=0.12)
        axis.set_xlim(start, room and axis.dataLim.x1 * room if axis.dataLim.x1 > 0 else None)
        axis.grid(axis="y", visible=False)
        axis.tick_params(left=False)
    figure.tight_layout()
    save_picture(figure, png)


# -----------------------------------------------------------------------------
# Verbs
# -----------------------------------------------------------------------------


def list_verb(args: argparse.Namespace) -> int:
    folder = Path(args.folder)
    records = shown_records(folder)
    if args.write:
        regions = {folder: table_region(records), **{r.folder: record_region(r) for r in records}}
        for path, text in ((where / "README.md", text) for where, text in regions.items()):
            before, _, after = split_region(path)
            write_file(path, before + text + after)
    rows = list(map(record_row, records)) or foreign_rows(folder)
    if args.json:
        print_json([dict(zip(COLUMNS, row)) for row in rows])
    elif rows:
        print_table(COLUMNS, rows)
    else:
        print(f"no records in {folder}")
    return 0


def diff_verb(args: argparse.Namespace) -> int:
    diff = diff_sources(source_of(args.a), source_of(args.b))
    if args.html:
        write_file(Path(args.html), diff_html(diff, args.a, args.b))
        print(f"wrote {args.html}", file=sys.stderr)
    if args.json:
        print_json({"a": args.a, "b": args.b, **diff})
        return 0
    print(f"{args.a} → {args.b}: {lines_words(diff)} lines in {len(diff['sections'])} of "
          f"{diff['sections_in_all']} sections")
    for note in diff["notes"]:
        print(note)
    fields = [f"{h['name']}: {h['a'] or '(none)'} → {h['b'] or '(none)'}"
              for h in diff["hyperparameters"]]
    for kind, names in {"hyperparameters": fields, **diff["definitions"]}.items():
        if names:
            print(f"\n{kind}\n  " + "\n  ".join(names))
    if diff["sections"]:
        print()
        print_table(("section", "added", "removed"), [
            (s["title"], f"+{s['added']}", f"−{s['removed']}") for s in diff["sections"]])
    if not args.stat and not args.html:
        for section in diff["sections"]:
            print(f"\n--- {section['title']} ---", *section["lines"], sep="\n")
    return 0


def curves_verb(args: argparse.Namespace) -> int:
    groups = {}
    for operand in args.operands:
        path = Path(operand).resolve()
        name = path.parent.name if path.name == "log.txt" else path.stem
        groups[name if name not in groups else operand] = logs_of(operand)
    logs = [log for group in groups.values() for log in group]
    for log in logs:
        log.val = {step: pair for step, pair in log.val.items() if math.isfinite(pair[0])}
        if not log.val:
            raise LedgerError(f"{log.path} has no validation in its {log.last_step} steps; "
                              "give a longer run")
    for log in logs:
        for note in log.notes:
            print(f"{log.path}: {note}", file=sys.stderr)
    target = args.target if args.target is not None else min(log.target for log in logs)
    found, rows = [], []
    for loss in common_losses(logs, target):
        cells = []
        for name, group in groups.items():
            hits = [hit for log in group if (hit := log.reach(loss))]
            timed = [ms for _, ms in hits if ms is not None]
            step = statistics.median(step for step, _ in hits) if hits else None
            ms = statistics.median(timed) if timed else None
            found.append({"loss": loss, "name": name, "step": step, "time_ms": ms,
                          "reached": len(hits), "n": len(group)})
            share = f" ({len(hits)} of {len(group)})" if len(hits) < len(group) else ""
            cells.append(f"{duration(ms)}, step {step:g}{share}" if hits else "not reached")
        rows.append((f"{loss:g}" + " (target)" * (loss == target), *cells))
    if args.json:
        print_json(found)
    else:
        print("time and step of the first validation at or below a loss, median of the seeds\n")
        print_table(("loss", *groups), rows)
    if args.png:
        draw_curves(groups, target, args.png)
    return 0


def run_verb(args: argparse.Namespace) -> int:
    contestants = [Contestant.of(operand) for operand in args.operands]
    names = [contestant.name for contestant in contestants]
    if len(set(names)) < len(names):
        raise LedgerError(f"two of {', '.join(names)} have the same name; rename one")
    scipy_stats()  # it should be missing before hours of training, not after
    run_all(contestants, args)
    runs = {contestant.name: list(map(run_facts, contestant.logs)) for contestant in contestants}
    target, results, rows = read_log(contestants[0].logs[0]).target, [], []
    for index, contestant in enumerate(contestants):
        name, versus, cells = contestant.name, None, ("–", "–")
        if index:
            parent = read_record(contestant.folder).claim["parent"] if contestant.folder else None
            parent = parent if parent in runs else names[index - 1]
            versus = {"name": parent, **compare(runs[name], runs[parent])}
            cells = (f"{parent_words(versus)} ({parent})", ratio_words(versus))
        p = p_below([run["val_loss"] for run in runs[name]], target)
        summary = summarize(runs[name])
        results.append({"name": name, **summary, "target": target, "p_target": p,
                        "against": versus, "runs": runs[name]})
        rows.append((name, str(summary["n"]), decimal(summary["val_loss_mean"]),
                     decimal(summary["val_loss_std"]), p_words(p),
                     duration(summary["train_time_ms_median"]), *cells))
    if args.json:
        print_json(results)
    else:
        print_table(("script", "n", "mean loss", "std", f"mean < {target:g}", "median time",
                     "loss (against)", "time ratio"), rows)
    if args.script_args:
        print("record.json is not written: a record runs its preset as it is", file=sys.stderr)
    else:
        write_measurements(contestants)
    return 0


def verify_verb(args: argparse.Namespace) -> int:
    found, count = verify(Path(args.folder).resolve())
    if args.json:
        print_json({"records": count, "findings": found})
    elif found:
        print("\n".join(found))
    else:
        print(f"{count} record(s) verified: the logs bear every claim" if count else
              f"no records in {args.folder}: nothing to verify")
    return 1 if found else 0


def extract_verb(args: argparse.Namespace) -> int:
    log = read_log(Path(args.log))
    if log.source is None:
        known = f", but the sha256 of one, {log.sha256}" if log.sha256 else ""
        raise LedgerError(f"{log.path} has no source in it{known}; try another seed's log")
    files = split_files(log.source)
    if args.file and args.file not in files:
        raise LedgerError(f"--file {args.file}: the log has {', '.join(files)}")
    if len(files) > 1 and not args.file:
        print(f"{log.path} has {len(files)} files joined: {', '.join(files)}; "
              "--file NAME gives one", file=sys.stderr)
    sys.stdout.write(files[args.file] if args.file else log.source)
    return 0


def lineage_verb(args: argparse.Namespace) -> int:
    records = shown_records(Path(args.folder))
    if not records:
        raise LedgerError(f"{args.folder} has no records to draw; give a folder of records")
    draw_lineage(records, args.png or str(Path(args.folder) / "lineage.png"))
    return 0


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}; --help shows the usage\n")


def count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 up")
    return int(text)


def build_parser() -> Parser:
    parser = Parser(prog="ledger.py", description=__doc__.partition("\n")[0])
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    def verb(action, summary: str, *operands: str, folder: bool = False, table: bool = True):
        name = action.__name__.removesuffix("_verb")
        sub = verbs.add_parser(name, help=summary, description=summary)
        sub.set_defaults(action=action)
        for operand in operands:
            sub.add_argument(operand.lower(), metavar=operand, help="folder, script or log")
        if folder:
            sub.add_argument("folder", nargs="?", default=RECORDS, help="default: records/")
        if table:
            sub.add_argument("--json", action="store_true", help="JSON in place of a table")
        return sub.add_argument

    flag = verb(list_verb, "the table of records", folder=True)
    flag("--write", action="store_true", help="also fill in the generated parts of the READMEs")
    flag = verb(diff_verb, "what changed between two sources, section by section", "A", "B")
    flag("--stat", action="store_true", help="the summary without the lines")
    flag("--html", metavar="OUT", help="write a page that needs nothing else")
    flag = verb(curves_verb, "loss over steps, tokens and time; time to a loss")
    flag("operands", nargs="+", metavar="A", help="folder or log")
    flag("--png", metavar="OUT", help="draw it")
    flag("--target", type=float, metavar="LOSS", help="default: the logs' own target_loss")
    flag = verb(run_verb, "measure scripts on this machine, in turns")
    flag("operands", nargs="+", metavar="A", help="record folder or script")
    flag("--preset", default="pocket", help="of every run (default: pocket)")
    flag("--seeds", type=count, default=10, metavar="N", help="runs of each (default: 10)")
    flag("--nproc", type=count, default=1, metavar="N", help="processes of a run (default: 1)")
    flag("--out", metavar="FOLDER", help="keeps the runs; finished ones in it are used")
    flag("--script-args", nargs=argparse.REMAINDER, default=[], metavar="...",
         help="the rest goes to the scripts, and record.json is not written")
    verb(verify_verb, "recompute every claim from the logs; exit 1 if one fails", folder=True)
    flag = verb(extract_verb, "the source inside a log, to standard output", "LOG", table=False)
    flag("--file", metavar="NAME", help="one of several files joined")
    flag = verb(lineage_verb, "draw the ladder of records", folder=True, table=False)
    flag("--png", metavar="OUT", help="default: lineage.png in the folder")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run a verb; the exit status."""
    args = build_parser().parse_args(argv)
    try:
        return args.action(args)
    except LedgerError as error:
        print(f"ledger.py: {error}", file=sys.stderr)
        return error.status
    except OSError as error:
        name = str(error.filename).removesuffix(".tmp")
        print(f"ledger.py: {name}: {error.strerror}; give another path", file=sys.stderr)
        return 2


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `run` stops as by ctrl-C
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `ledger.py diff A B | head`
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
