"""The ladder as a picture whose points are links: published minutes by date, as SVG."""

import io
import re
from datetime import date
from html import escape
from pathlib import Path

from ledger import pages
from ledger.records import read_public

YEARS, HALVES = (2024, 2025, 2026, 2027), (1, 7)
SHADES = {"#000000": "currentColor", "#e3e6e9": "#88888855", "#006ba4": "#3189c9"}  # in the dark


def ladder_svg(folder: Path, records: list) -> str:
    """All public records, those with a script here by name where there is room.

    A point leads to the record's page, or to its row in the table of all public records.
    """
    import matplotlib
    from matplotlib.dates import DateFormatter, date2num
    from matplotlib.figure import Figure

    public = read_public(folder)
    scripts = [record for record in records if record.number]
    titles, points = {}, {}  # of points, by where they lead: words; (day, minutes)
    for number, row in public.items():
        address = f"#public-{number}"
        points[address] = date2num(date.fromisoformat(row["date"])), float(row["minutes"])
        titles[address] = f"#{number}, {row['minutes']} min: {row['idea']}"
    for one in scripts:
        day, minutes = points.pop(f"#public-{one.number}", (
            date2num(date.fromisoformat(one.folder.name[:10])), float(one.minutes or 45)))
        points[f"{one.folder.name}.html"] = day, minutes
        titles[f"{one.folder.name}.html"] = f"{one.name}, {one.minutes} min: {one.claim['change']}"
    with matplotlib.rc_context({
            "font.size": 10, "axes.grid": True, "grid.color": "#e3e6e9", "axes.spines.top": False,
            "axes.spines.right": False, "svg.fonttype": "none", "svg.hashsalt": "ladder"}):
        figure = Figure(figsize=(9, 5), layout="constrained")
        axis = figure.subplots()
        for is_here, color, label in ((False, "C7", "public record"),
                                      (True, "#006ba4", "with a script here")):
            some = {address: point for address, point in points.items()
                    if address.endswith(".html") == is_here}
            dots = axis.scatter(*zip(*some.values()), s=34 if is_here else 14, color=color,
                                label=label) if some else None
            if dots:
                dots.set_urls([*some])
        days = [day for day, _ in points.values()]
        axis.set(xlabel="date of the public record", ylabel="published minutes on 8×H100",
                 yscale="log", xlim=(min(days) - 20, max(days) + 110))
        axis.set_yticks([0.7, 1, 1.5, 2, 3, 5, 10, 20, 40])
        axis.yaxis.set_major_formatter("{x:g}")
        ticks = [date2num(date(year, month, 1)) for year in YEARS for month in HALVES]
        axis.set_xticks([tick for tick in ticks if min(days) <= tick <= max(days)])
        axis.xaxis.set_major_formatter(DateFormatter("%b %Y"))
        axis.minorticks_off()
        axis.legend(frameon=False)
        figure.draw_without_rendering()  # so that places in it are known
        taken = []
        for one in sorted(scripts, key=lambda one: one.number not in pages.MILESTONES):
            label = f"{one.name}, {one.minutes} min"
            name = axis.annotate(label, points[f"{one.folder.name}.html"], (4, 4),
                                 textcoords="offset points", fontsize=7)
            box = name.get_window_extent()
            if any(map(box.overlaps, taken)):
                name.remove()
            else:
                taken.append(box)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return in_page(file.getvalue(), titles)


def in_page(svg: str, titles: dict) -> str:
    """An SVG of matplotlib as a part of a page: without a head, with the page's colours."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg"):], flags=re.S)
    svg = re.sub(r'<svg .*?viewBox="(.*?)".*?>', r'<svg class="ladder" viewBox="\1" role="img" '
                 'aria-label="Published minutes of the public records by date">', svg, count=1,
                 flags=re.S)
    for color, shade in SHADES.items():
        svg = svg.replace(color, shade)

    def link(found):
        address = found[1]
        return f'<a href="{address}"><title>{escape(titles[address])}</title>'

    return re.sub(r'<a xlink:href="(.*?)".*?>', link, svg).replace("xlink:href", "href")
