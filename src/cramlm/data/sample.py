"""A small task and a corpus made by code, for a first run without own data and without a network: `write_sample`.

The task: which of four hobbies is a short note about? A note has a sentence with two words of its hobby beside neutral ones, and often one
with a word of another hobby. The few training notes have only a part of each hobby's words; the corpus, notes of eight hobbies without
labels, shows which words belong together. So retrieved text helps, and half of the corpus is of no use to the task.
"""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cramlm.errors import UsageError
from cramlm.storage.artifacts import publish_file
from cramlm.storage.locks import environment_faults


@dataclass(frozen=True, slots=True)
class Hobby:
    """The words of a hobby. things: nouns with "the" before them. actions: verbs in the past tense before a noun."""

    things: Sequence[str]
    actions: Sequence[str]


def _hobby(things: str, actions: str) -> Hobby:
    return Hobby(things.split(", "), actions.split(", "))


# fmt: off
LABELLED: Final = {
    "astronomy": _hobby(
        "telescope, eyepiece, comet, nebula, crater, eclipse, meteor, planet, star chart, tripod, galaxy, lens cap, moon filter, aurora, "
        "satellite, constellation, mirror, finder scope, dark sky, double star, supernova, sunspot, orbit, dew heater, red lamp, zenith",
        "observed, focused on, photographed, sketched, tracked, located, resolved, magnified"),
    "cooking": _hobby(
        "saucepan, dough, broth, oven, whisk, garlic, risotto, cutting board, pepper mill, marinade, pastry, ladle, stew, butter, "
        "sourdough, skillet, vinaigrette, flour, spice rack, custard, noodle, rolling pin, yeast, colander, onion, glaze",
        "simmered, seasoned, kneaded, roasted, tasted, whisked, baked, strained"),
    "gardening": _hobby(
        "trowel, seedling, compost, hedge, greenhouse, tomato plant, pruning shears, mulch, rose bush, watering can, raised bed, weed, "
        "lawn, bulb, wheelbarrow, tulip, trellis, topsoil, fern, slug trap, rhubarb, cold frame, dahlia, rake, fertilizer, shrub",
        "planted, pruned, watered, weeded, mulched, transplanted, harvested, grafted"),
    "sailing": _hobby(
        "anchor, mainsail, rudder, jib, hull, harbour, tiller, keel, lighthouse, mooring, spinnaker, compass, dinghy, buoy, halyard, "
        "winch, mast, cleat, tide table, bilge pump, regatta, boom, deck, headwind, life vest, reef",
        "hoisted, steered for, trimmed, moored by, tacked past, furled, rigged, sighted"),
}
OTHERS: Final = {
    "carpentry": _hobby(
        "chisel, oak plank, lathe, dovetail, sawdust, clamp, varnish, bench vice, plywood, mortise, sander, wood glue, bandsaw, hinge, "
        "veneer, spirit level, drawer, mallet, router bit, tenon",
        "sawed, sanded, glued, planed, carved, varnished, drilled, clamped"),
    "chess": _hobby(
        "knight, endgame, opening, bishop, pawn chain, checkmate, rook, castling move, gambit, queen, clock, tournament, sacrifice, fork, "
        "stalemate, passed pawn, blunder, king side, exchange, tempo",
        "attacked, sacrificed, defended, captured, pinned, forked, promoted, traded"),
    "music": _hobby(
        "violin, chord, metronome, melody, piano, drum kit, sheet music, oboe, choir, rehearsal, tempo mark, cello, refrain, tuning fork, "
        "microphone, sonata, guitar string, bass line, trumpet, encore",
        "tuned, played, rehearsed, composed, transposed, recorded, performed, arranged"),
    "railways": _hobby(
        "locomotive, platform, signal box, timetable, freight wagon, sleeper, junction, tunnel, viaduct, steam whistle, boiler, guard, "
        "branch line, turntable, carriage, buffer, ticket office, points lever, tender, siding",
        "coupled, shunted, photographed, boarded, restored, painted, fired up, inspected"),
}
_TOPICAL: Final = (
    "{who} {action} the {thing} next to the {kind} {other}", "After {amount} {who} {action} the {thing} without the {other}",
    "The {kind} {thing} was better than the old {other}", "{when} {who} bought the {thing} and later {action} the {other}",
    "Nobody had {action} the {thing} before the {other} came", "In the end the {thing} and the {kind} {other} were worth the trouble",
    "With the {thing} in mind {who} {action} the {other} {when}", "{who} wrote about the {thing}, the {other} and little else",
)
_DISTRACTING: Final = (
    "{who} would rather have the {thing}", "{when} {who} only had eyes for the {kind} {thing}", "The {thing} of a neighbour was in the way",
    "{who} dreams of the {kind} {thing} and of {amount} off",
)
_NEUTRAL: Final = (
    "{when} {who} got up early", "It took {amount}", "{who} wrote it down {when}", "The weather was {kind} {when}",
    "{who} asked a neighbour for advice", "That was {kind}, but not too expensive", "{who} plans to do it again in {amount}",
    "There was a {kind} surprise {when}", "Everything else had to wait for {amount}", "{who} sent a {kind} photo to a friend",
)
_WHO: Final = ("she", "he", "my sister", "my uncle", "the teacher", "our group", "a colleague", "the twins", "everyone", "an old friend")
_WHEN: Final = ("on Sunday", "in the evening", "last week", "before lunch", "yesterday", "in spring", "at night", "during the holidays")
_AMOUNT: Final = ("two hours", "a whole day", "some minutes", "a month", "half a year", "three weekends", "a long time")
_KIND: Final = ("strange", "pleasant", "small", "mixed", "quiet", "good", "boring", "new", "useful")
# fmt: on
_DISTRACTED: Final = 0.5  # share of the notes with a word of another hobby
_PASSAGE_NOTES: Final = (3, 7)  # notes of one hobby in a passage of the corpus
_HOBBIES: Final = (*LABELLED.values(), *OTHERS.values())
SPLITS: Final = {"train": 40, "dev": 80, "test": 400}
PASSAGES: Final = 3_000


def write_sample(folder: Path, *, seed: int = 13, passages: int = PASSAGES) -> dict[str, int]:
    """Write train.csv, dev.csv, test.csv (text, label) and corpus.jsonl (id, text) to `folder`; return the number of rows of each file.

    Equal arguments give equal files.

    Raises:
        UsageError: if one of these files exists with another content; nothing is written.
    """
    generator = random.Random(seed)
    files: dict[str, bytes] = {}
    seen: set[str] = set()
    for split, count in SPLITS.items():
        rows: list[tuple[str, str]] = []
        labels = list(LABELLED)
        while len(rows) < count:
            label = labels[len(rows) % len(labels)]
            text = _note(generator, LABELLED[label])
            if text not in seen:
                seen.add(text)
                rows.append((text, label))
        generator.shuffle(rows)
        files[f"{split}.csv"] = _csv(rows)
    texts = [_passage(generator, generator.choice(_HOBBIES)) for _ in range(passages)]
    lines = (json.dumps({"id": str(number), "text": text}) + "\n" for number, text in enumerate(texts, start=1))
    files["corpus.jsonl"] = "".join(lines).encode()
    with environment_faults(folder):
        for path, content in ((folder / name, content) for name, content in files.items()):
            if path.exists() and (path.is_dir() or path.read_bytes() != content):
                raise UsageError(f"{path}: exists with another content, which would be replaced; pass another folder")
    for name, content in files.items():
        publish_file(folder / name, content)
    return {**{f"{split}.csv": count for split, count in SPLITS.items()}, "corpus.jsonl": passages}


def _note(generator: random.Random, hobby: Hobby) -> str:
    """Return a topical sentence and two others, neutral or with a word of any hobby, in random order."""
    sentences = [_sentence(generator, hobby, _TOPICAL), _sentence(generator, hobby, _NEUTRAL)]
    if generator.random() < _DISTRACTED:
        sentences.append(_sentence(generator, generator.choice(_HOBBIES), _DISTRACTING))
    else:
        sentences.append(_sentence(generator, hobby, _NEUTRAL))
    generator.shuffle(sentences)
    return " ".join(sentences)


def _passage(generator: random.Random, hobby: Hobby) -> str:
    return " ".join(_note(generator, hobby) for _ in range(generator.randint(*_PASSAGE_NOTES)))


def _sentence(generator: random.Random, hobby: Hobby, templates: Sequence[str]) -> str:
    thing, other = generator.sample(list(hobby.things), 2)
    sentence = generator.choice(templates).format(
        who=generator.choice(_WHO),
        thing=thing,
        other=other,
        action=generator.choice(hobby.actions),
        when=generator.choice(_WHEN),
        amount=generator.choice(_AMOUNT),
        kind=generator.choice(_KIND),
    )
    return f"{sentence[0].upper()}{sentence[1:]}."


def _csv(rows: Sequence[tuple[str, str]]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("text", "label"))
    writer.writerows(rows)
    return text.getvalue().encode()
