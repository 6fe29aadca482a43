"""What all parts of the ledger share: its errors, and reading and writing of files."""

import hashlib
import os
from pathlib import Path


class LedgerError(Exception):
    """Input that cannot be used; the message names file or flag, value and remedy."""

    status = 2


class RunError(LedgerError):
    """A run that failed or was stopped."""

    status = 1


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


def write_file(path: Path, text: str) -> None:
    """Replace a file in one step, so that neither reader nor crash finds half of it."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8", newline="")
    os.replace(temporary, path)


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
