"""The model card: its front matter, tables, the parts of the method that it names, and what it must not contain."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from test_export import LABELS, provenance

from cramlm import recipes
from cramlm.config.run import RunConfig
from cramlm.export.card import model_card
from cramlm.export.hub import published
from cramlm.linear.files import Setting


def card_data(**changes: Any) -> dict[str, Any]:
    own = {"labels": list(LABELS), "parameters": 4_200_000, "vocab_size": 8192, "max_length": 128, "mlm": True}
    return {**own, "versions": {"cramlm": "0.1.0", "torch": "2.13.0"}, **provenance(), **changes}


def card_data_of(config: RunConfig) -> dict[str, Any]:
    return card_data(config=config.model_dump(mode="json"), kind=config.task.kind, scores={})


def test_the_front_matter_has_library_task_and_scores_and_a_license_only_if_given() -> None:
    given = card_data(
        config={"name": "mine", "task": {"train": "/secret/place/train.csv", "dev": None, "test": "/secret/place/test\n.csv"}}
    )
    head = ModelCard(model_card(given)).data
    assert (head.library_name, head.pipeline_tag, head.license, head.model_name) == ("transformers", "text-classification", None, "mine")
    assert "cramlm" in head.tags
    measured = given["scores"]["models"]["mine"]["test"]
    assert {(each.metric_name, each.metric_type, each.metric_value) for each in head.eval_results} == {
        ("macro-F1", "f1", round(measured["macro_f1"], 4)),
        ("micro-F1", "f1", round(measured["micro_f1"], 4)),
        ("accuracy", "accuracy", round(measured["accuracy"], 4)),
    }
    assert {(each.dataset_name, each.dataset_split) for each in head.eval_results} == {("test .csv", "test")}
    licensed = ModelCard(model_card(card_data(scores={}), license_id="apache-2.0", language="no")).data
    assert (licensed.license, licensed.language, licensed.eval_results) == ("apache-2.0", "no", None)


def test_scores_have_intervals_and_the_rows_of_other_models() -> None:
    given = card_data()
    models = given["scores"]["models"]
    setting = Setting("multinomial", "balanced", 30.0, vector_weight=0.5)
    fit = {"variant": "union", **setting.as_dict(), "train_texts": 100}
    models["static"] = {"dev": models["mine"]["dev"], "fit": fit}
    models["mine"]["test"]["per_class"][LABELS[0]]["support"] = 4
    given["scores"]["comparison"] = {"cross_fitted": {"static": 0.612, "mine": 0.7}}
    card = model_card(given)
    assert re.search(r"^\| \*\*mine\*\* \(this model\) \| 8\d\.\d \(\d\d\.\d–\d\d\.\d\) \|", card, flags=re.MULTILINE)
    assert re.search(r"^\| static \| .*\| 61\.2 \|", card, flags=re.MULTILINE)
    assert re.search(r"^\| model \| .*dev macro-F1, cross-fitted", card, flags=re.MULTILINE)
    assert "(tokens and characters, multinomial, balanced class weights, C = 30, vector weight 0.5)" in card
    assert "Use it (macro-F1 85.7)." in card
    assert "1 of its labels have fewer than 10 evaluation texts" in card


@pytest.mark.parametrize("scores", [True, False])
def test_every_table_has_as_many_cells_in_each_row(scores: bool) -> None:
    """Labels hold a bar, which would end a cell."""
    for block in re.findall(r"(?:^\|.*\n?)+", model_card(card_data() if scores else card_data(scores={})), flags=re.MULTILINE):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(widths) == 1, block


def test_a_card_of_many_labels_and_files_says_how_many_it_leaves_out() -> None:
    names = [f"label {number}" for number in range(50)]
    given = card_data(labels=names)
    row = {"precision": 0.5, "recall": 0.5, "f1": 0.5, "support": 20}
    given["scores"]["models"]["mine"]["test"]["per_class"] = dict.fromkeys(names, row)
    files = [{"name": f"{number}.jsonl", "rows_used": 7, "sha256": "0" * 64} for number in range(45)]
    card = model_card({**given, "corpus": {"passages": {"kept": 3}, "rows": {"used": 3}, "files": files}})
    assert "This model on test by label (the first 40 of 50):" in card
    assert card.count("| 50.0 | 50.0 | 50.0 | 20 |") == 40
    assert "  - 39.jsonl: 7 rows, sha256 `0000000000000000…`\n  - and 5 more files\n" in card
    assert "This model on test by label:" in model_card(card_data())


def test_a_static_model_is_not_trained_on_the_passages_that_another_model_retrieved() -> None:
    fit = {"variant": "words", **Setting("multinomial", "uniform", 1.0, vector_weight=1.0).as_dict(), "vectors": True}
    fit |= {"train_texts": 100, "seconds": 1.0, "tried": [], "tau": 0.0, "features": 900}
    given = card_data(scores={})
    assert "Raw text trained on: 777 passages" in model_card(given)
    assert "Raw text of the model `bayes`, not of this one: 777 passages" in model_card({**given, "model": "static", "fit": fit})


def test_names_from_data_are_escaped_and_files_are_named_without_their_folders() -> None:
    card = model_card(card_data(labels=["<script>alert(1)</script>", "a\n# heading", "[x](http://y)", "\x1b[31m"]))
    for forbidden in ("<script>", "\n# heading", "[x](", "\x1b", "secret/place"):
        assert forbidden not in card
    assert "corpus-a.jsonl.zst: 4,321 rows, sha256 `abababababababab…`" in card


def test_data_and_cost_are_in_the_card_if_the_run_has_them() -> None:
    card = model_card(card_data())
    data = ("100 train, 20 dev, 60 test", "777 passages", "23 were removed because they overlap", "best 50 by BM25")
    for phrase in (*data, "1.5e+15", "3,456,789", "Seed 13.", "4.2M parameters"):
        assert phrase in card, phrase
    assert "Unlabelled texts of the task" not in card
    texts = {**card_data()["task"], "unlabelled": 1234}
    assert "60 test.\n- Unlabelled texts of the task: 1,234.\n- Raw text searched" in model_card(card_data(task=texts))
    bare = model_card({name: value for name, value in card_data(mlm=False).items() if name not in provenance()})
    assert "labelled texts only" in bare
    for absent in ("## Scores", "## Data", "None"):
        assert absent not in bare.replace("top_k=None", "")


LOCAL = "embeddings from word vectors and co-occurrence, layers that start by copying neighbours"
FEW = f"a linear teacher, distribution alignment, {LOCAL}, label smoothing and logit adjustment"


@pytest.mark.parametrize(
    ("recipe", "texts", "present", "absent"),
    [
        (
            "tlm",
            0,
            [
                f"Training also used a linear teacher, {LOCAL} and logit adjustment.",
                "fitted on the training texts and on the words of the labels' names. The encoder",
                "for the raw text (phase joint, weight 1) and for the training texts, each held out of its fit (phase finetune, weight 1)",
            ],
            ["smoothing", "lignment"],
        ),
        ("tlm", 20, [f"Training also used {FEW}.", "(phase joint, weight 1).", "- Label smoothing: 0.2 (phase finetune)."], []),
        (
            "tlm_plain",
            0,
            ["started from random weights and used no teacher, no label smoothing and no logit adjustment"],
            ["Linear teacher", "Training also used"],
        ),
        ("pet", 0, ["- Pseudo-labels: probabilities that the model of phase finetune predicts for the raw text"], ["inear teacher"]),
    ],
    ids=["tlm", "tlm with few texts", "tlm-plain", "pet"],
)
def test_the_parts_of_the_method_are_named(recipe: str, texts: int, present: list[str], absent: list[str], tmp_path: Path) -> None:
    train = tmp_path / "train.csv"
    train.write_text("text,label\n" + "".join(f"text {number},{number % 2}\n" for number in range(texts)), "utf-8")
    given = card_data_of(getattr(recipes, recipe)(train=str(train) if texts else "", corpus="corpus.jsonl"))
    for card in (model_card(given), model_card(published(given))):
        assert all(phrase in card for phrase in present)
        assert not any(phrase in card for phrase in absent)


def test_embeddings_start_from_word_vectors_of_a_search_server_and_from_co_occurrence_without_raw_text() -> None:
    given = card_data_of(recipes.tlm(train="", corpus="corpus.jsonl"))
    server = {"kind": "elasticsearch", "url": "http://localhost:9200", "index": "passages"}
    for retriever, start in ((server, "embeddings from word vectors and co-occurrence"), (None, "co-occurrence embeddings")):
        config = {**given["config"], "corpus": None, "retriever": retriever}
        assert f"a linear teacher, {start}, layers" in model_card({**given, "config": config})


def test_what_uses_markers_is_a_part_of_the_method() -> None:
    given = card_data_of(recipes.tlm(train="", corpus="corpus.jsonl"))
    given["config"]["teacher"]["mark_passages"] = True
    given["config"]["encoder"]["layer_init"] = "markers"
    card = model_card(given)
    assert "Training also used a linear teacher, markers in passages, embeddings" in card
    assert "layers that start by copying neighbours, heads that start at markers and logit adjustment" in card


def test_a_model_of_a_checkpoint_did_not_start_from_random_weights() -> None:
    checkpoint = {"name": "bert", "fingerprint": "f0", "sha256": {"model.safetensors": "ab" * 32}}
    card = model_card({**card_data_of(recipes.tlm_plain(train="", corpus="corpus.jsonl")), "init": checkpoint})
    assert "started from the weights of bert" in card
    assert "Training used no teacher, no label smoothing and no logit adjustment." in card
    assert "random weights" not in card


def test_unknown_terms_are_omitted_and_a_number_has_no_logit_adjustment() -> None:
    given = card_data_of(recipes.tlm(train="", corpus="corpus.jsonl"))
    given["config"]["phases"][0]["terms"] = None
    assert "Training also used" not in model_card(given)
    assert "logit adjustment" not in model_card(card_data_of(recipes.tlm(train="", corpus="corpus.jsonl", kind="regression")))


@pytest.mark.parametrize("kind", ["classification", "multi-label", "regression"])
def test_a_model_of_pairs_is_used_with_pairs(kind: str) -> None:
    card = model_card(card_data(kind=kind, pairs=True, scores={}))
    assert 'predict(["some text"], ["its second text"])' in card
    assert 'classify({"text": "some text", "text_pair": "its second text"})' in card
    assert "pair of texts" in card or "pairs of texts" in card
    assert "pair" not in model_card(card_data(kind=kind, scores={}))


@pytest.mark.parametrize(
    ("retriever", "phrase"),
    [
        ({"kind": "random", "max_documents": 10}, "sampled at random"),
        ({"kind": "dsir"}, "importance resampling"),
        ({"kind": "dense", "top_k": 7}, "best 7 by sentence embeddings"),
        ({"kind": "union", "retrievers": [{"kind": "bm25"}, {"kind": "dsir"}]}, "chosen by bm25 and dsir in turn"),
    ],
)
def test_the_retriever_is_named(retriever: dict[str, Any], phrase: str) -> None:
    assert phrase in model_card(card_data(retriever=retriever))
