from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from test_export import LABELS, provenance

from cramlm import recipes
from cramlm.config.run import RunConfig
from cramlm.export.card import model_card
from cramlm.export.hub import published


def facts(**changes: Any) -> dict[str, Any]:
    own = {"labels": list(LABELS), "parameters": 4_200_000, "vocab_size": 8192, "max_length": 128, "mlm": True}
    return {**own, "versions": {"cramlm": "0.1.0", "torch": "2.13.0"}, **provenance(), **changes}


def test_the_front_matter_has_library_and_task_but_no_license() -> None:
    head = model_card(facts()).split("---\n")[1]
    settings = [line for line in head.splitlines() if not line.startswith("#")]
    assert settings[:2] == ["library_name: transformers", "pipeline_tag: text-classification"]
    assert "- cramlm" in settings
    assert not any(line.startswith("license") for line in settings)


def test_the_front_matter_has_the_scores_as_a_model_index() -> None:
    given = facts(config={"name": "mine", "task": {"train": "/secret/place/train.csv", "dev": None, "test": "/secret/place/test\n.csv"}})
    head = ModelCard(model_card(given)).data
    measured = given["scores"]["models"]["mine"]["test"]
    assert head.model_name == "mine"
    assert {(each.metric_name, each.metric_type, each.metric_value) for each in head.eval_results} == {
        ("macro-F1", "f1", round(measured["macro_f1"], 4)),
        ("micro-F1", "f1", round(measured["micro_f1"], 4)),
        ("accuracy", "accuracy", round(measured["accuracy"], 4)),
    }
    assert {(each.dataset_name, each.dataset_split) for each in head.eval_results} == {("test .csv", "test")}
    assert "model-index" not in model_card(facts(scores={}))


def test_license_and_language_are_in_the_front_matter_if_given() -> None:
    card = model_card(facts(), license_id="apache-2.0", language="no")
    head = ModelCard(card).data
    assert (head.license, head.language) == ("apache-2.0", "no")
    assert "left to you" not in card


def test_the_card_of_a_linear_model_loads_no_torch(tmp_path: Path) -> None:
    fit = {"variant": "words", "scheme": "multinomial", "class_weights": "uniform", "c": 1.0, "tau": 0.0, "vectors": False}
    fit |= {"features": 10, "train_texts": 100, "seconds": 1.5, "tried": [{}]}
    given = facts(model="tfidf", fit=fit)
    (tmp_path / "facts.json").write_text(json.dumps(given), "utf-8")
    code = (
        "import json, sys\nfrom cramlm.export.card import model_card\nprint(model_card(json.load(open(sys.argv[1], encoding='utf-8'))))\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    printed = subprocess.run([sys.executable, "-c", code, tmp_path / "facts.json"], capture_output=True, text=True, check=True).stdout
    assert "library_name: cramlm" in printed
    assert "Fitted on 100 labelled texts in 1.5 seconds." in printed
    assert printed.splitlines()[-1] == "[]"


def test_scores_have_intervals_and_baselines() -> None:
    card = model_card(facts())
    own = next(line for line in card.splitlines() if "(this model)" in line)
    assert re.fullmatch(r"\| \*\*mine\*\* \(this model\) \| 8\d\.\d \(\d\d\.\d–\d\d\.\d\) (\| 8\d\.\d \(\d\d\.\d–\d\d\.\d\) ){2}\|", own)
    baseline = next(line for line in card.splitlines() if line.startswith("| tfidf-words"))
    assert baseline.endswith("| – | – |")
    assert "Use it (macro-F1 85.7)." in card


def test_linear_models_are_described_with_cross_fitted_scores() -> None:
    given = facts()
    fit = {"variant": "union", "scheme": "multinomial", "class_weights": "balanced", "c": 30.0, "train_texts": 100}
    dev = next(iter(given["scores"]["models"].values()))["dev"]
    given["scores"]["models"] = {"mine": {"dev": dev}, "static": {"dev": dev, "fit": fit}, "tfidf": {"dev": dev, "fit": fit}}
    given["scores"]["comparison"] = {"cross_fitted": {"tfidf": 0.5, "static": 0.612, "mine": 0.7}}
    card = model_card(given)
    assert "`static` is a linear model (multinomial logistic regression) on TF-IDF and averaged token vectors, fitted on 100" in card
    assert "(union, balanced class weights, C = 30)" in card
    row = next(line for line in card.splitlines() if line.startswith("| static |"))
    assert "| 61.2 |" in row
    header = next(line for line in card.splitlines() if line.startswith("| model |"))
    assert "dev macro-F1, cross-fitted" in header
    assert row.count("|") == header.count("|")


def test_every_table_has_as_many_cells_in_each_row() -> None:
    """Labels hold a bar, which would end a cell."""
    for block in re.findall(r"(?:^\|.*\n?)+", model_card(facts()), flags=re.MULTILINE):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(widths) == 1, block


def test_names_from_data_are_escaped() -> None:
    card = model_card(facts(labels=["<script>alert(1)</script>", "a\n# heading", "[x](http://y)", "\x1b[31m"]))
    assert "<script>" not in card
    assert "\n# heading" not in card
    assert "[x](" not in card
    assert "\x1b" not in card


def test_files_are_named_without_their_folders() -> None:
    card = model_card(facts())
    assert "corpus-a.jsonl.zst: 4,321 rows, sha256 `abababababababab…`" in card
    assert "secret/place" not in card


def test_data_and_cost_are_in_the_card() -> None:
    card = model_card(facts())
    data = ("100 train, 20 dev, 60 test", "777 passages", "23 were removed because they overlap", "best 50 by BM25")
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


def card_of(config: RunConfig) -> str:
    return model_card(facts(config=config.model_dump(mode="json"), kind=config.task.kind, scores={}))


def test_the_parts_of_the_method_are_named() -> None:
    card = card_of(recipes.tlm(train="", corpus="corpus.jsonl"))
    assert "Training also used a linear teacher, co-occurrence embeddings and logit adjustment." in card
    assert "- Linear teacher: logistic regression on TF-IDF and averaged token embeddings, fitted on the training labels." in card
    assert (
        "for the raw text (phase joint, weight 1) and for the training texts, each held out of its fit (phase finetune, weight 1)" in card
    )
    assert "smoothing" not in card
    assert "lignment" not in card


def test_with_few_texts_a_label_alignment_and_smoothing_are_named(tmp_path: Path) -> None:
    train = tmp_path / "train.csv"
    train.write_text("text,label\n" + "".join(f"text {number},{number % 2}\n" for number in range(20)), "utf-8")
    config = recipes.tlm(train=str(train), corpus="corpus.jsonl")
    card = card_of(config)
    names = "a linear teacher, distribution alignment, co-occurrence embeddings, label smoothing and logit adjustment"
    assert f"Training also used {names}." in card
    assert f"Training also used {names}." in model_card(published(facts(config=config.model_dump(mode="json"))))
    assert "for the raw text (phase joint, weight 1)." in card
    assert "- Label smoothing: 0.2 (phase finetune)." in card


def test_a_run_without_these_parts_is_described_as_such() -> None:
    card = card_of(recipes.tlm_plain(train="", corpus="corpus.jsonl"))
    assert "no teacher, no co-occurrence embeddings, no label smoothing and no logit adjustment" in card
    for word in ("Linear teacher", "Training also used"):
        assert word not in card


def test_the_card_omits_unknown_settings() -> None:
    config = recipes.tlm(train="", corpus="corpus.jsonl").model_dump(mode="json")
    config["phases"][0]["terms"] = None
    card = model_card(facts(config=config))
    assert "Training also used" not in card
    assert "no teacher" not in card


def test_pseudo_labels_are_named_with_the_phase_that_gave_them_and_a_number_has_no_logit_adjustment() -> None:
    card = card_of(recipes.pet(train="", corpus="corpus.jsonl"))
    assert "- Pseudo-labels: probabilities that the model of phase finetune predicts for the raw text (phase distil, weight 1)." in card
    assert "inear teacher" not in card
    assert "logit adjustment" not in card_of(recipes.tlm(train="", corpus="corpus.jsonl", kind="regression"))


def test_random_retrieval_is_named() -> None:
    assert "sampled at random" in model_card(facts(retriever={"kind": "random", "max_documents": 10}))
    assert "importance resampling" in model_card(facts(retriever={"kind": "dsir"}))
    assert "best 7 by sentence embeddings" in model_card(facts(retriever={"kind": "dense", "top_k": 7}))
    union = {"kind": "union", "retrievers": [{"kind": "bm25"}, {"kind": "dsir"}]}
    assert "chosen by bm25 and dsir in turn" in model_card(facts(retriever=union))


def test_labels_with_few_texts_get_a_warning() -> None:
    given = facts()
    given["scores"]["models"]["mine"]["test"]["per_class"][LABELS[0]]["support"] = 4
    assert "1 of its labels have fewer than 10 evaluation texts" in model_card(given)
