"""The contract between a record and the harness, which stands at the banner, is what the code does.
"""

import builtins
import functools
import re
import symtable

from record_folders import RECORDS, below, definition, for_each, parent_of, source

ASKED, OFFERED = "# What it asks of a record:", "# What a record may use of it:"
# What no tiny run reaches, and the records that change it. Elsewhere it is the parent's.
CHANGES = {
    "order_blocks": [],
    "compile_on_gpu": [],
    "consecutive_rows": [],
    "round_up": [],
    "flex_mask": ["2024-11-24_WindowWarmup", "2024-12-08_UNetValueEmbedsTweaks", "2025-09-03_FA3"],
    "FP8Product": ["2026-08-30_92h_Fp8Products"],
    "to_fp8": ["2026-08-30_92h_Fp8Products"],
    "scaled_mm": ["2026-08-30_92h_Fp8Products"],
}


@functools.cache
def names_of(text):
    """The global names that a source defines, imports and uses, and all builtin ones."""
    def used(table):
        found = {symbol.get_name() for symbol in table.get_symbols()
                 if symbol.is_referenced() and (symbol.is_global() or table is module)}
        return found.union(*map(used, table.get_children()))

    module = symtable.symtable(text, "script", "exec")
    imported = {each.get_name() for each in module.get_symbols() if each.is_imported()}
    defined = {each.get_name() for each in module.get_symbols() if each.is_assigned()}
    return defined - imported, imported, used(module) - set(dir(builtins))


def contract_of(record):
    """The names that the harness asks of a record, those it offers, and those of `run`."""
    text = below(record)
    asked, offered = text[: text.index("\nimport ")].split(OFFERED)
    offered, of_run = offered.split("of `run`:")
    return [set(re.findall(r"\w+", part)) for part in (asked.split(ASKED)[1], offered, of_run)]


def used_of_run(record):
    return set(re.findall(r"\brun\.(\w+)", source(record)))


@for_each(RECORDS)
def test_record_and_harness_use_what_the_contract_names(record):
    asked, offered, of_run = contract_of(record)
    own, own_imports, used = names_of(source(record))
    of_harness, its_imports, used_by_harness = names_of(below(record))
    assert used_by_harness & own <= asked | {"SCRIPT", "SOURCE"}
    assert used & (of_harness | its_imports) - own_imports <= offered
    assert used_of_run(record) <= of_run


def test_nothing_stands_in_the_contract_that_no_record_uses():
    of_run = contract_of(RECORDS[-1])[-1]
    assert of_run == set().union(*map(used_of_run, RECORDS))


def test_what_no_tiny_run_reaches_changes_where_it_is_meant_to():
    for record in filter(parent_of, RECORDS):
        for name, changes in CHANGES.items():
            now, before = definition(record, name), definition(parent_of(record), name)
            is_changed = None not in (now, before) and now != before
            assert is_changed == (record.name in changes), (
                f"{record.name} and {name}: CHANGES names the records that change it")
