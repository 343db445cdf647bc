"""Which writing systems a text is in, by the Unicode names of its letters: no model, no table, nothing to install.

The Unicode name of a letter begins with its script ("CYRILLIC SMALL LETTER A"), so the first word of the name gives it (two words for a
few). Compatibility forms (fullwidth, mathematical) are taken back by NFKC first. Marks, digits and punctuation belong to every script and
count for none. Languages of one script are not told apart.
"""

from __future__ import annotations

import functools
import unicodedata
from collections import Counter
from collections.abc import Iterable

_NAMES = {
    **dict.fromkeys(("CJK", "IDEOGRAPHIC", "OLD CHINESE"), "Han"),
    **dict.fromkeys(("HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "HENTAIGANA", "MASU"), "Kana"),
    **dict.fromkeys(("TURNED", "ROMAN"), "Latin"),
    "NEW TAI": "New Tai Lue",
}
_TWO_WORDS = {"OLD", "NEW", "TAI", "LINEAR", "INSCRIPTIONAL"}  # begin the names of several scripts, or say nothing alone
_NOT_SCRIPTS = {
    *("MODIFIER", "FEMININE", "MASCULINE", "MICRO", "OHM", "KELVIN", "ANGSTROM", "DOUBLE-STRUCK", "SCRIPT", "ALEF", "BET"),
    *("CARON", "TILDE", "VEDIC"),
}


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
    words = unicodedata.name(plain, "").removeprefix("VERTICAL ").split(" ")
    first = " ".join(words[:2]) if words[0] in _TWO_WORDS else words[0]
    return None if not first or first in _NOT_SCRIPTS else _NAMES.get(first, first.title())
