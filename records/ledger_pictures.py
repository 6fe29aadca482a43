"""Pictures: loss curves, and the ladder of records."""

import itertools
import math
import statistics
import sys
from dataclasses import dataclass

from ledger_base import LedgerError
from ledger_logs import Log
from ledger_records import Record, timed
from ledger_tables import machines, minutes_words, missed_words

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


# -----------------------------------------------------------------------------
# Curves
# -----------------------------------------------------------------------------


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


def training_curve(logs: list[Log], points: int = 50) -> list[tuple[int, float, float | None]]:
    """(step, training loss, time) of a run in pieces of its steps: means over pieces and seeds."""
    steps = sorted(set.intersection(*({step for step, (loss, _) in log.train.items()
                                       if loss is not None and math.isfinite(loss)}
                                      for log in logs)))
    size, found = max(1, len(steps) // points), []
    for piece in (steps[start:start + size] for start in range(0, len(steps), size)):
        times = [log.train[piece[-1]][1] for log in logs]
        loss = statistics.fmean(log.train[step][0] for log in logs for step in piece)
        found.append((piece[-1], loss, None if None in times else statistics.fmean(times)))
    return found


@dataclass
class Curve:
    """One line of the picture: a folder's runs, in the mean, with their range."""

    label: str
    steps: list[int]
    tokens: list[float] | None
    times: list[float] | None  # milliseconds
    mean: list[float]
    low: list[float]
    high: list[float]
    training: bool  # of the training loss, which validations then end

    @classmethod
    def of(cls, name: str, logs: list[Log]) -> "Curve":
        """The validation losses of runs; of runs that validate once, the training losses too."""
        steps = trained_steps(logs)
        rows = [[log.val[step] for log in logs] for step in steps]
        losses = [[loss for loss, _ in row] for row in rows]
        times = [[ms for _, ms in row] for row in rows]
        mean, low, high = (list(map(of, losses)) for of in (statistics.fmean, min, max))
        times = None if None in sum(times, []) else list(map(statistics.fmean, times))
        trained = training_curve(logs) if len(steps) == 1 else []
        trained = [point for point in trained if point[0] <= steps[0]]
        if len(trained) > 1:
            steps = [*(step for step, _, _ in trained), *steps]
            before = [ms for _, _, ms in trained]
            times = None if times is None or None in before else before + times
            mean, low, high = ([*(loss for _, loss, _ in trained), *ends]
                               for ends in (mean, low, high))
        tokens = None
        if logs[0].tokens_per_step:
            tokens = [logs[0].tokens_until(step) for step in steps]
        label = name + f" ({len(logs)} runs, mean and range)" * (len(logs) > 1)
        return cls(label, steps, tokens, times, mean, low, high, len(trained) > 1)

    def panel(self, kind: str) -> list[float] | None:
        return getattr(self, kind)


def draw_curves(groups: dict[str, list[Log]], target: float, png: str) -> None:
    """Loss over steps, tokens and training time, each panel where a log has it."""
    plt = pyplot()
    curves = [Curve.of(name, group) for name, group in groups.items()]
    tops = {kind: max((curve.panel(kind)[-1] for curve in curves if curve.panel(kind)), default=0)
            for kind in ("steps", "tokens", "times")}
    units = {"steps": (1, ""), "tokens": unit_of(tops["tokens"], (1e9, "billions"),
                                                 (1e6, "millions"), (1e3, "thousands")),
             "times": unit_of(tops["times"], (60_000, "minutes"), (1000, "seconds"))}
    names = {"steps": "steps", "tokens": "training tokens", "times": "training time"}
    kinds = [kind for kind in names if tops[kind]] or ["steps"]
    figure, axes = plt.subplots(1, len(kinds), figsize=(5 * len(kinds) + 0.5, 5), sharey=True,
                                squeeze=False)
    axes = axes[0]
    axes[0].axhline(target, label=f"target {target:g}", **DASHED)
    for curve, color, style in zip(curves, itertools.cycle(COLORS), itertools.cycle(STYLES)):
        for axis, kind in zip(axes, kinds):
            x = curve.panel(kind)
            if x is None:
                print(f"{curve.label} has no {names[kind]}, so it is not in that panel",
                      file=sys.stderr)
                continue
            x = [value / units[kind][0] for value in x]
            if curve.training:
                axis.plot(x[:-1], curve.mean[:-1], color=color, linestyle=style, linewidth=1.4,
                          label=curve.label)
            else:
                axis.plot(x, curve.mean, color=color, linestyle=style, linewidth=2.4,
                          label=curve.label)
            axis.plot(x[-1], curve.mean[-1], "o", color=color, markersize=7)
            axis.fill_between(x, curve.low, curve.high, color=color, alpha=0.2, linewidth=0)
    # A curve of training begins with the untrained model: what is above its first tenth is cut.
    top = max(target, *(curve.mean[len(curve.mean) // 10 if curve.training else 0]
                        for curve in curves))
    bottom = min(target, *(min(curve.low) for curve in curves))
    margin = max(top - bottom, 0.01) * 0.06
    for axis, kind in zip(axes, kinds):
        axis.axhline(target, **DASHED)
        axis.tick_params(left=False)
        unit = f" ({units[kind][1]})" * bool(units[kind][1])
        axis.set(xlabel=names[kind] + unit, xlim=(0, 1.05 * tops[kind] / units[kind][0] or None),
                 ylim=(bottom - margin, top + margin))
    axes[0].xaxis.get_major_locator().set_params(integer=True)
    axes[0].set_ylabel("loss (nats per token;\nline: training, point: validation)"
                       if any(curve.training for curve in curves)
                       else "validation loss (nats per token)")
    handles, labels = axes[0].get_legend_handles_labels()
    columns = max(1, min(len(labels), 43 * len(kinds) // (max(map(len, labels)) + 8)))
    figure.legend(handles, labels, loc="upper center", ncols=columns, handlelength=3)
    inches = 0.3 * math.ceil(len(labels) / columns) + 0.15  # of the legend
    figure.set_figheight(5 + inches)
    figure.tight_layout(rect=(0, 0, 1, 5 / (5 + inches)))
    save_picture(figure, png)


# -----------------------------------------------------------------------------
# Ablations
# -----------------------------------------------------------------------------


def draw_ablations(tables: dict[int, list], png: str) -> None:
    """What each technique is worth: the loss it costs to do without it, with its interval, at each
    number of steps, beside the steps that it saved in public, in the order of these."""
    plt = pyplot()
    published = {row.ablation.name: row.ablation.published for rows in tables.values()
                 for row in rows if row.ablation.published is not None}
    names = sorted(published, key=published.get)
    figure, axes = plt.subplots(1, 1 + len(tables), sharey=True,
                                figsize=(4 + 4 * len(tables), 0.42 * len(names) + 1.8))
    axes[0].barh(names, [published[name] for name in names], height=0.5, color=COLORS[0])
    axes[0].set_xlabel("published: steps saved (%)")
    for axis, (steps, rows) in zip(axes[1:], tables.items()):
        for row in rows:
            if row.ablation.name in published:
                axis.errorbar(row.difference, row.ablation.name, xerr=row.interval or 0, fmt="D",
                              color=COLORS[1], capsize=4, markersize=7)
        axis.axvline(0, **DASHED)
        axis.set_xlabel(f"measured: loss without it, {steps} steps\n"
                        "(nats per token; line: 95 % interval)")
    for axis in axes:
        axis.grid(axis="y", visible=False)
        axis.tick_params(left=False)
    figure.tight_layout()
    save_picture(figure, png)


# -----------------------------------------------------------------------------
# The ladder
# -----------------------------------------------------------------------------


def draw_lineage(records: list[Record], png: str) -> None:
    """The ladder: minutes on 8×H100 beside tokens and time measured here, and on what.

    Every number stands to the right of its panel, on no line.
    """
    plt = pyplot()
    axes = []
    left, bottom, width, height = 2.6, 1.35, 3.0, 0.62 * len(records) + 0.4  # inches, of a panel
    page = 20.8
    figure = plt.figure(figsize=(page, bottom + height + 0.45))
    for words_inches in (3.4, 3.4, 2.4):  # to the right of the panel
        box = (left / page, bottom / figure.get_figheight(), width / page,
               height / figure.get_figheight())
        axes.append(figure.add_axes(box, sharey=axes[0] if axes else None))
        axes[-1].tick_params(left=False, labelleft=len(axes) == 1)
        left += width + words_inches
    for y, record in enumerate(records):
        published, measured = record.claim["published"], record.measured
        words = ["not published", "not measured", "not measured"]
        if published:
            axes[0].barh(y, published["minutes"], height=0.5, color=COLORS[0])
            words[0] = minutes_words(published["minutes"])
        if modelled := record.claim["modelled"]:
            axes[0].plot(modelled["minutes"], y, "D", color="white", markeredgecolor="black",
                         markersize=9, clip_on=False)
            words[0] += f", modelled {minutes_words(modelled['minutes'])}"
        if measured:
            times = [run["train_time_ms"] / 1000 for run in timed(measured)["runs"]]
            axes[1].barh(y, measured["tokens"] / 1e6, height=0.5, color=COLORS[1])
            dots(axes[2], y, times, statistics.median(times), COLORS[2])
            words[1] = (f"{measured['tokens'] / 1e6:.2f} M, loss {measured['val_loss_mean']:.4f}"
                        + missed_words(measured))
            words[2] = f"{statistics.median(times):.2f} s, {measured['steps']:,} steps"
        for axis, text in zip(axes, words):
            axis.annotate(text, (1.03, y), xycoords=("axes fraction", "data"), va="center",
                          annotation_clip=False, fontsize=12,
                          color=GREY if text.startswith("not") else "black")
    targets = sorted({record.measured["target"] for record in records if record.measured})
    presets = sorted({record.measured["preset"] for record in records if record.measured})
    preset = presets[0] if len(presets) == 1 else "measured"
    names = [f"{record.claim['number']}  {record.name}\n{record.date}" for record in records]
    axes[0].set(yticks=range(len(records)), yticklabels=names, ylim=(len(records) - 0.4, -0.7),
                xlabel="minutes on 8×H100\n(bar: published, diamond: modelled)")
    goal = f" to a loss of {targets[0]:g}" if len(targets) == 1 else ""
    axes[1].set_xlabel(f"{preset}: training tokens{goal}\n(millions)")
    axes[2].set_xlabel(f"{preset}: training time{goal}\n(s; dots: seeds, diamond: median)")
    for axis in axes:
        axis.grid(axis="y", visible=False)
        low, high = axis.dataLim.intervalx
        if low <= high:  # it has data
            axis.set_xlim(0, 1.08 * high or 1)
    measured_on = "; ".join(machines(records))
    figure.text(0.01, 0.02, f"Measured on {measured_on}" if measured_on else "Nothing measured yet",
                color=GREY, fontsize=11.5)
    save_picture(figure, png)


def dots(axis, y: int, values: list[float], middle: float, color: str) -> None:
    """The seeds as dots, their mean or median as a diamond."""
    axis.plot(values, [y] * len(values), "o", color=color, alpha=0.35, markersize=6, clip_on=False)
    axis.plot(middle, y, "D", color=color, markersize=9, clip_on=False)
