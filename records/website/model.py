"""Pictures of a record's model, which its script makes: the layers, and the attention masks."""

import difflib
import functools
import re
import sys
import types
from dataclasses import dataclass, fields, is_dataclass
from html import escape

from ledger.scripts import above

ROW, TOP, LETTER = 22, 30, 5.5  # of the picture of layers, in pixels
# What a model may have beside its layers: how the picture calls it
ENTRY = {"smear_gate": "smear", "bigram_embed": "bigram table", "ngram_table": "n-gram table"}
DRAWN = ("window", "table", "no_mlp", "mlps", "skip", "takes_skip", "saved")  # not as words

# A tiny sequence for the masks: with the real sizes nothing could be seen.
TOKENS, STARTS, BLOCK, LONG, SHORT, CUT = 32, (0, 9, 14), 4, 12, 4, 10


@dataclass
class Model:
    """What the pictures show."""

    rows: list  # of layers, each a dict
    entry: list  # words for what is at the bottom
    skips: list  # pairs of layers: output of one, added before the other
    saved: list  # layers whose output is read at the end
    meaning: dict  # words of a layer: what they mean
    masks: dict  # window: the first position that each position reads


@functools.lru_cache(maxsize=4)  # a parent's is shown on its children's pages, too
def model_of(source: str) -> Model | None:
    """A script's model; None where the script has another form than ours."""
    import torch  # noqa: F401  its lack is told, and is no other form of a script

    module = types.ModuleType("script of a record")
    module.__file__ = __file__
    sys.modules[module.__name__] = module  # where dataclasses look their own up
    try:
        exec(compile(above(source), module.__name__, "exec"), vars(module))
        model = small_model(module)
        rows = [layer_of(block, index) for index, block in enumerate(model.blocks)]
        tables = getattr(model, "value_embeds", ())
        for index, row in enumerate(rows):
            if "table" not in row and len(tables) == len(rows):
                row["table"] = index  # before there were rows: one for each layer
        meaning = {"gate": "its heads are gated"} | meanings(source)
        windows = window_words(meaning.pop("window", ""))
        for row in rows:
            words = windows.get(row["window"], "attention")
            row["words"] = words.replace("short, of paired", "paired")
        skips = [(index, target) for index, row in enumerate(rows) if row.get("skip")
                 for target in targets_of(rows, index)]
        for index in range(len(getattr(model, "skip_weights", ()))):  # U-Net: the last one first
            pairs = len(model.skip_weights)
            skips.append((pairs - 1 - index, pairs + index))
        saved = [index for index, row in enumerate(rows) if row.get("saved")]
        entry = [words for name, words in ENTRY.items() if hasattr(model, name)]
        return Model(rows, entry, skips, saved, meaning, masks_of(model))
    except Exception:  # of any kind: a script of one's own may have another model
        return None
    finally:
        del sys.modules[module.__name__]


def layer_of(block, index: int) -> dict:
    """What a block has: its row in the table of layers, if there is one, and its modules."""
    row = {"window": ""}
    if is_dataclass(layer := getattr(block, "layer", None)):
        row = {field.name: getattr(layer, field.name) for field in fields(layer)}
    kinds = [type(module).__name__ for module in block.modules()]
    gates = {part for name, _ in block.named_parameters() for part in name.split(".")
             if part.endswith("_gate")}
    words = [name for name, value in row.items() if value is True and name not in DRAWN]
    words += ["gate"] * ("attn_gate" in gates)
    return row | {"attention": "CausalSelfAttention" in kinds, "count": kinds.count("MLP"),
                  "flags": words, "gated_table": "value_gate" in gates}


def targets_of(rows: list, source: int) -> list:
    """The layers that a skip leads to: those that say so, or else the ones without attention."""
    for test in (lambda row: row.get("takes_skip"), lambda row: not row["attention"]):
        if found := [index for index, row in enumerate(rows) if test(row) and index > source]:
            return found
    return []


def meanings(source: str) -> dict:
    """The fields of the table of layers, and what the comments beside them say."""
    table = re.search(r"^class Layer:\n(.*?)\n\n\n", above(source), re.M | re.S)
    return dict(re.findall(r"^    (\w+): .*?  # (.*)$", table[1] if table else "", re.M))


def window_words(comment: str) -> dict:
    """Letters of windows, and the words that the comment of the field has for them."""
    found = re.findall(r'"(\w)": (.*?)(?=, "\w":|, None:|$)', comment)
    return dict(found)


def small_model(module):
    """A script's model with the layers of the record, and else as small as the pocket's."""
    if hasattr(module, "first_keys"):
        module.BLOCK = BLOCK
        module.dense_mask = module.first_keys  # so that a view has no mask, but what it is made of
    whole = vars(module.Hyperparameters())
    sizes = dict(attention_cut=CUT, window_tokens=LONG)
    sizes |= {name: whole.get(name) for name in ("layers", "num_layers")}
    sizes = {name: value for name, value in sizes.items() if name in whole}
    return module.GPT(module.Hyperparameters(**module.POCKET | sizes))


def masks_of(model) -> dict:
    """For each window of a model, the first position that each of a tiny sequence's reads."""
    import torch

    if not (hasattr(model, "views") or hasattr(model, "view")):
        return {}
    if hasattr(model, "reach"):
        model.reach.fill_(LONG)
        if model.reach.ndim:
            model.reach[1] = SHORT
    inputs = torch.zeros(1, TOKENS, dtype=torch.int32)
    inputs[0, list(STARTS)] = model.cfg.eot_token
    if not hasattr(model, "views"):  # before there were several
        return {"": model.view(inputs).mask.tolist()}
    views = model.views(inputs)
    return {window: view.mask.tolist() for window, view in views.items()}


# ---- Pictures ----
def layers_svg(model: Model, parent: Model | None) -> str:
    """The layers from the embedding down to the head; rows that the parent lacks are marked."""
    new = set()
    if parent:
        keys = [[*map(drawn, one.rows)] for one in (parent, model)]
        for tag, _, _, start, end in difflib.SequenceMatcher(None, *keys, False).get_opcodes():
            new |= set(range(start, end)) if tag != "equal" else set()

    def middle(index):
        return TOP + ROW * index + ROW / 2

    count = len(model.rows)
    height = TOP + ROW * count + 30
    longest = max(len(words_of(row)) for row in model.rows)
    arcs = round(222 + LETTER * longest)  # where the lines between layers begin
    width = arcs + 8 * count + 10
    entry = ", ".join(["token embedding", *model.entry])
    parts = [f'<text x="24" y="18">{escape(entry)}</text>',
             f'<text x="24" y="{height - 10}">head</text>']
    for index, row in enumerate(model.rows):
        top = TOP + ROW * index
        if index in new:
            parts.append(f'<rect class="new" x="0" y="{top}" width="{arcs - 5}" '
                         f'height="{ROW}"></rect>')
        parts.append(f'<text x="4" y="{top + 15}">{index}</text>')
        if row["attention"]:
            wide = 118 if row["words"].startswith("long") or not row["window"] else 84
            parts.append(f'<rect class="attention" x="24" y="{top + 3}" width="{wide}" '
                         f'height="16"></rect><text x="28" y="{top + 15}">'
                         f'{escape(row["words"])}</text>')
        for number in range(row["count"]):
            parts.append(f'<rect class="mlp" x="{148 + 36 * number}" y="{top + 3}" width="32" '
                         f'height="16"></rect><text x="{151 + 36 * number}" y="{top + 15}">MLP'
                         '</text>')
        parts.append(f'<text x="222" y="{top + 15}">{escape(words_of(row))}</text>')
    for source, target in model.skips:
        bulge = arcs + 8 + 8 * (target - source)
        start, end = TOP + ROW * (source + 1) - 4, TOP + ROW * target + 4
        parts.append(f'<path class="skip" d="M{arcs} {start}C{bulge} {start} {bulge} {end} '
                     f'{arcs} {end}"><title>skip from layer {source} to layer {target}</title>'
                     "</path>")
    for source in model.saved:
        start, end = TOP + ROW * (source + 1) - 4, height - 14
        parts.append(f'<path class="saved" d="M{arcs} {start}C{width} {start} {width} {end} 50 '
                     f'{end}"><title>the output of layer {source} is read later</title></path>')
    spoken = "; ".join(f"{index}: {row['words'] if row['attention'] else 'no attention'}, "
                       f"{row['count']} MLP{', ' * bool(words_of(row))}{words_of(row)}"
                       for index, row in enumerate(model.rows))
    return (f'<svg class="model" viewBox="0 0 {width} {height}" width="{width}" role="img" '
            f'aria-label="The {count} layers of the model. {escape(spoken)}">{"".join(parts)}'
            "</svg>")


def words_of(row: dict) -> str:
    """What stands beside a layer: its value table and what is true of it."""
    words = list(row["flags"])
    if row.get("table") is not None:
        words.insert(0, f"table {row['table']}{' gated' * row['gated_table']}")
    return ", ".join(words)


def drawn(row: dict) -> tuple:
    """What the picture shows of a layer."""
    return row["attention"] and row["words"], row["count"], words_of(row)


def mask_svg(first: list, title: str) -> str:
    """Rows are positions that read, columns those that are read; lines where documents begin."""
    size = 160 / len(first)
    path = "".join(f"M{size * key:g} {size * query:g}H{size * (query + 1):g}v{size:g}"
                   f"H{size * key:g}z" for query, key in enumerate(first))
    lines = "".join(f"M{5 * start} 0V160M0 {5 * start}H160" for start in STARTS[1:])
    return (f'<figure><svg class="mask" viewBox="0 0 160 160" role="img" '
            f'aria-label="{escape(title)}"><path d="{path}"></path>'
            f'<path class="axis" d="{lines}M0 0H160V160H0z"></path></svg>'
            f"<figcaption>{escape(title)}</figcaption></figure>")


def model_html(source: str, parent: str | None) -> str:
    """HTML of a script's model: its layers, and its masks where the parent's are others."""
    model = model_of(source)
    before = model_of(parent) if parent else None
    if not model:
        return ""
    words = {flag for row in model.rows for flag in row["flags"]}
    words |= {name for name in ("skip", "saved") if any(row.get(name) for row in model.rows)}
    legend = "; ".join(f"<b>{escape(name)}</b>: {escape(text)}"
                       for name, text in model.meaning.items() if name in words)
    facts = [[[*map(drawn, one.rows)], one.skips, one.saved, one.entry]
             for one in (model, before) if one]
    same = before and facts[0] == facts[1]
    told = ["Its layers, as the script builds them."]
    if before and not same:
        told.append("Those that differ from the parent's are highlighted.")
    if model.skips:
        told.append("Arcs are skips: the output of one layer is added to the input of another.")
    if model.saved:
        told.append("A dashed arc is an output that is read again at the end.")
    shown = (f"<p>{' '.join(told)} {legend + '.' if legend else ''}</p>\n"
             f'<div class="wide">{layers_svg(model, before)}</div>\n')
    if same:
        shown = f"<details><summary>Unchanged from the parent</summary>\n{shown}</details>\n"
    html = f'<h2 id="model">The model</h2>\n{shown}'
    old = before.masks if before else {}
    if before and not old:  # plain attention: all earlier tokens of a row
        old = {window: [0] * TOKENS for window in model.masks}
    new = {window: first for window, first in model.masks.items() if old.get(window) != first}
    if new:
        figures = []
        for window, first in new.items():
            name = model_window(model, window)
            if window in old:
                figures.append(mask_svg(old[window], f"{name}, before"))
            figures.append(mask_svg(first, name))
        short = f", short ones of {SHORT}" if len(model.masks) > 1 else ""
        cut = ("" if "attention_cut" not in source else
               f" Attention is cut after {CUT} tokens of a document.")
        html += (f'<h3 id="mask">The attention mask</h3>\n<p>What each token reads in a sequence '
                 f"of {TOKENS} with three documents, by the script's own code. Each row is a "
                 f"token; blue marks what it can read. Sizes are tiny, so that one can see them: "
                 f"blocks of {BLOCK} tokens, a window of {LONG}{short}.{cut}</p>\n"
                 f'<div class="plots">{"".join(figures)}</div>\n')
    return html


def model_window(model: Model, window: str) -> str:
    words = next((row["words"] for row in model.rows if row["window"] == window), "")
    return f"{words} window" if words.startswith(("long", "short")) else words or "attention"
