from __future__ import annotations

import re
from typing import Any

from test_export import LABELS, provenance

from cramlm.deploy.card import model_card


def facts(**changes: Any) -> dict[str, Any]:
    own = {"labels": list(LABELS), "parameters": 4_200_000, "vocab_size": 8192, "max_length": 128, "mlm": True}
    return {**own, "versions": {"cramlm": "0.1.0", "torch": "2.13.0"}, **provenance(), **changes}


def test_the_front_matter_names_library_and_task_and_leaves_the_license_to_the_user() -> None:
    head = model_card(facts()).split("---\n")[1]
    settings = [line for line in head.splitlines() if not line.startswith("#")]
    assert settings[:2] == ["library_name: transformers", "pipeline_tag: text-classification"]
    assert "- cramlm" in settings
    assert not any(line.startswith("license") for line in settings)


def test_scores_stand_beside_the_baselines_with_their_intervals() -> None:
    card = model_card(facts())
    own = next(line for line in card.splitlines() if "(this model)" in line)
    assert re.fullmatch(r"\| \*\*mine\*\* \(this model\) \| 8\d\.\d \(\d\d\.\d–\d\d\.\d\) (\| 8\d\.\d \(\d\d\.\d–\d\d\.\d\) ){2}\|", own)
    baseline = next(line for line in card.splitlines() if line.startswith("| tfidf-words"))
    assert baseline.endswith("| – | – |")
    assert "Use it (macro-F1 85.7)." in card


def test_every_table_has_as_many_cells_in_each_row() -> None:
    """Labels hold a bar, which would end a cell."""
    for block in re.findall(r"(?:^\|.*\n?)+", model_card(facts()), flags=re.MULTILINE):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(widths) == 1, block


def test_names_from_data_cannot_become_markup() -> None:
    card = model_card(facts(labels=["<script>alert(1)</script>", "a\n# heading", "[x](http://y)", "\x1b[31m"]))
    assert "<script>" not in card
    assert "\n# heading" not in card
    assert "[x](" not in card
    assert "\x1b" not in card


def test_files_are_named_without_the_folders_they_lay_in() -> None:
    card = model_card(facts())
    assert "corpus-a.jsonl.zst: 4,321 rows, sha256 `abababababababab…`" in card
    assert "secret/place" not in card


def test_the_data_and_the_cost_are_told() -> None:
    card = model_card(facts())
    data = ("100 train, 20 dev, 60 test", "777 passages", "23 that overlap", "best 50 by BM25")
    for phrase in (*data, "1.5e+15", "3,456,789", "Seed 13.", "4.2M parameters"):
        assert phrase in card, phrase
    assert "arxiv.org/abs/2111.04130" in card


def test_a_run_without_corpus_baselines_or_scores_has_a_card_without_them() -> None:
    bare = {name: value for name, value in facts(mlm=False).items() if name not in provenance()}
    card = model_card(bare)
    assert "## Scores" not in card
    assert "## Data" not in card
    assert "labelled texts only" in card
    assert "None" not in card.replace("top_k=None", "")


def test_random_retrieval_is_called_so() -> None:
    assert "drawn at random" in model_card(facts(retriever={"kind": "random", "max_documents": 10}))
    assert "importance resampling" in model_card(facts(retriever={"kind": "dsir"}))
    assert "best 7 by sentence embeddings" in model_card(facts(retriever={"kind": "dense", "top_k": 7}))
    union = {"kind": "union", "retrievers": [{"kind": "bm25"}, {"kind": "dsir"}]}
    assert "chosen by bm25 and dsir in turn" in model_card(facts(retriever=union))


def test_labels_measured_on_few_texts_are_warned_of() -> None:
    given = facts()
    given["scores"]["models"]["mine"]["test"]["per_class"][LABELS[0]]["support"] = 4
    assert "1 of its labels had fewer than 10 texts" in model_card(given)
