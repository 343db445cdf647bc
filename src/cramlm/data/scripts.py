"""Which writing systems a text is in, by the Unicode names of its letters: no model, no table, nothing to install.

The Unicode name of a letter begins with its script ("CYRILLIC SMALL LETTER A"), so the first word of the name tells it. Compatibility forms
(fullwidth, mathematical) are taken back by NFKC first. Marks, digits and punctuation belong to every script and count for none. Languages
of one script are not told apart.
"""

from __future__ import annotations

import functools
import unicodedata
from collections import Counter
from collections.abc import Iterable

_NAMES = {"CJK": "Han", "HIRAGANA": "Kana", "KATAKANA": "Kana"}
_NOT_SCRIPTS = {"MODIFIER", "FEMININE", "MASCULINE", "MICRO", "OHM", "KELVIN", "ANGSTROM", "DOUBLE-STRUCK", "SCRIPT", "ALEF", "BET"}


def count_scripts(texts: Iterable[str]) -> Counter[str]:
    """Letters of each script, over all texts."""
    counts: Counter[str] = Counter()
    for text in texts:
        if text.isascii():
            counts["Latin"] += sum(map(str.isalpha, text))
        else:
            counts.update(filter(None, map(_script, text)))
    return +counts


def main_script(text: str) -> str | None:
    """The script of most letters; None for a text without letters."""
    counts = count_scripts([text])
    return counts.most_common(1)[0][0] if counts else None


@functools.lru_cache(maxsize=100_000)
def _script(character: str) -> str | None:
    plain = unicodedata.normalize("NFKC", character)[:1]
    if not plain.isalpha():
        return None
    first = unicodedata.name(plain, "").partition(" ")[0]
    return None if not first or first in _NOT_SCRIPTS else _NAMES.get(first, first.capitalize())
