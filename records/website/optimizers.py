"""The second ladder's tables: its records, and all public results."""

import csv
from pathlib import Path

from ledger import pages
from website.markdown import Renderer

SOURCE = f"{pages.UPSTREAM}tree/master/records/track_3_optimization"
RECORDS = ("Record", "Idea", "Steps", "Published loss (runs)", "Largest difference (float64)",
           "Changed lines")
RESULTS = ("Result", "Date", "Steps", "Loss (runs)", "Idea", "By", "Script here")
TEXT = """## Records here

Each row is a change of its parent. Steps and losses are published ones; the largest difference is
relative, between our script and the specification of the published one, in float64.

{records}

## All public results

The 46 results that [the public list]({source}) accepted up to June 2026. Bold steps were a record
when they came.

{results}
"""


def read_results(folder: Path) -> list:
    """The rows of public.csv, each a dict; none where it is missing."""
    path = folder / "public.csv"
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def results_html(folder: Path, records: list, renderer: Renderer) -> str:
    """HTML of both tables."""
    steps = {int(row["result"]): f"{int(row['steps']):,}" for row in read_results(folder)}
    rows = []
    for record, row in zip(records, pages.ladder_rows(records, (), "../")):
        row["Steps"] = steps.get(record.result, row["Public record (min)"])
        rows.append([row[name] for name in RECORDS])
    scripts = {record.result: f"[{record.name}]({record.folder.name})" for record in records
               if record.result}
    results = []
    for row in read_results(folder):
        number = int(row["result"])
        name = f"[{number}]({pages.PULL}{row['pull_request']})" if row["pull_request"] else (
            f"{number}")
        count = f"**{int(row['steps']):,}**" if row["was_record"] else f"{int(row['steps']):,}"
        results.append([name, row["date"], count, f"{row['loss']} ({row['n']})", row["idea"],
                        row["authors"].replace(" ", ", "), scripts.get(number, "")])
    text = TEXT.format(source=SOURCE, records=pages.table(RECORDS, rows),
                       results=pages.table(RESULTS, results))
    return renderer.html(text, folder)
