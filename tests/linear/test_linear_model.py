"""A linear model's files: what is saved is what is loaded, and damage is an error that names the file."""

from __future__ import annotations

import errno
import json
import re
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import scipy.sparse
from linear_fixtures import (
    TOPICS,
    corpus_vectors,
    number_task,
    opposed_vectors,
    pair_task,
    relation_task,
    several_labels_task,
    topic_task,
    word_vectors,
)

from cramlm.errors import ArtifactError, EnvironmentFault
from cramlm.inference.linear import LinearPredictor
from cramlm.linear.features import VARIANTS, TextMatrices
from cramlm.linear.files import MODEL_FILE, WEIGHTS_FILE, is_linear
from cramlm.linear.fit import SearchSpace, fit_linear
from cramlm.linear.model import LinearModel, beside
from cramlm.linear.word_vectors import TENSORS_FILE, WORDS_FILE, WordVectors
from cramlm.records import Task
from damaging import cut, edit_json

TEXTS = ["", "wave ship", "the summit of a ridge", "漢字 ọ̀rọ̀", "w0 w2 filler1", "harbour " * 300]


def fit(task: Task, *, vectors: WordVectors | None = None, **options: Any) -> LinearModel:
    metric = "pearson" if task.kind == "regression" else "macro_f1"
    return fit_linear(task, SearchSpace((3.0,), metric, 0, **options), stage="baseline", vectors=corpus_vectors(vectors)).model


@pytest.fixture(scope="module")
def static() -> LinearModel:
    """A model of the variant union with text vectors."""
    task = topic_task(sea=30, hill=20, money=12)
    axes = {word: axis for axis, words in enumerate(TOPICS.values()) for word in words}
    return fit(task, vectors=word_vectors(axes), variants=("union",))


@pytest.fixture(scope="module")
def saved(static: LinearModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    static.save(folder)
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "model")
    return tmp_path / "model"


def test_a_loaded_model_gives_the_same_logits_bit_for_bit(static: LinearModel, saved: Path) -> None:
    loaded = LinearModel.load(saved)
    assert static.logits(TEXTS).shape == (len(TEXTS), 3)
    assert np.array_equal(loaded.logits(TEXTS), static.logits(TEXTS))
    assert (loaded.labels, loaded.setting, loaded.tau, loaded.kind) == (static.labels, static.setting, static.tau, static.kind)


@pytest.mark.parametrize(
    ("variant", "task"),
    [
        *((variant, relation_task() if variant == "marked" else topic_task()) for variant in VARIANTS),
        ("union", several_labels_task()),
        ("union", number_task()),
    ],
    ids=[*VARIANTS, "multi-label", "regression"],
)
def test_every_variant_and_kind_of_task_is_saved_and_loaded(variant: str, task: Task, tmp_path: Path) -> None:
    model = fit(task, variants=(variant,))
    model.save(tmp_path)
    loaded = LinearModel.load(tmp_path)
    assert np.array_equal(loaded.logits(TEXTS), model.logits(TEXTS))
    assert loaded.vectors is None
    assert not (tmp_path / WORDS_FILE).exists()
    assert is_linear(tmp_path)


def test_a_model_of_marked_texts_is_saved_and_loaded_with_the_vectors_of_their_segments(tmp_path: Path) -> None:
    task = relation_task()
    vectors = word_vectors({"raises": 0, "lowers": 1, "tin": 2})
    model = fit(task, vectors=vectors, variants=("marked",))
    texts = [*TEXTS, *(row.text for row in task.test)]
    assert model.features(texts).shape[1] == model.ngrams.width + vectors.vectors.shape[1] * (1 + len(model.ngrams.markers.kinds))
    model.save(tmp_path)
    loaded = LinearModel.load(tmp_path)
    assert np.array_equal(loaded.logits(texts), model.logits(texts))
    assert loaded.ngrams.markers == model.ngrams.markers
    stored = json.loads((tmp_path / MODEL_FILE).read_bytes())["markers"]
    wrong = [
        None,
        {},
        stored | {"strings": ["<<", "<<"]},
        stored | {"strings": [""]},
        stored | {"kinds": [["<<"]]},
        stored | {"kinds": [[1, 2]]},
    ]
    for markers in [*wrong, stored | {"kinds": stored["kinds"][1:]}]:
        edit_json(tmp_path / MODEL_FILE, markers=markers)
        with pytest.raises(ArtifactError, match=MODEL_FILE):
            LinearModel.load(tmp_path)


def test_a_model_of_pairs_is_saved_and_loaded_and_reads_them_as_in_training(tmp_path: Path) -> None:
    task, vectors = pair_task(), opposed_vectors()
    model = fit(task, vectors=vectors, variants=("marked",))
    model.save(tmp_path)
    loaded = LinearPredictor.load(tmp_path)
    texts, pairs = [row.text for row in task.test], [row.text_pair for row in task.test]
    assert loaded.model.features([row.divided_text for row in task.test]).shape[1] == loaded.model.coefficients.weights.shape[0]
    assert np.array_equal(loaded.logits(texts, pairs), model.logits([row.divided_text for row in task.test]))
    assert np.isfinite(loaded.logits(texts)).all(), "texts without a second one"


def test_a_text_alone_has_the_logits_that_it_has_among_others_and_in_shared_matrices(static: LinearModel) -> None:
    assert np.array_equal(static.logits_of_features(static.features(TextMatrices(TEXTS))), static.logits(TEXTS))
    alone = np.concatenate([static.logits([text]) for text in TEXTS])
    np.testing.assert_allclose(alone, static.logits(TEXTS), rtol=1e-5, atol=1e-5)
    assert static.logits([]).shape == (0, 3)


def description(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: edit_json(folder / MODEL_FILE, **changes)


def terms(change: Callable[[list[Any]], Any]) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        known = json.loads((folder / MODEL_FILE).read_bytes())["terms"]
        edit_json(folder / MODEL_FILE, terms=known | {"tokens": change(known["tokens"])})

    return edit


def tensors(change: Callable[[dict[str, Any]], Any], name: str = WEIGHTS_FILE) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        values = safetensors.numpy.load((folder / name).read_bytes())
        change(values)
        (folder / name).write_bytes(safetensors.numpy.save(values))

    return edit


FILES = (MODEL_FILE, WEIGHTS_FILE, WORDS_FILE, TENSORS_FILE)
WRONG_DESCRIPTIONS: list[dict[str, Any]] = [
    *({"labels": labels} for labels in ([], ["a", "a", "b"], [1, 2, 3], "abc")),
    *({"format": 1}, {"kind": "ranking"}, {"variant": "words"}, {"scheme": "boosting"}, {"kind": "regression"}),
    *({"class_weights": "twice"}, {"c": "much"}, {"vector_weight": "much"}),
]
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    **{f"no {file}": (lambda folder, file=file: (folder / file).unlink(), file) for file in FILES},
    **{f"{file} cut": (lambda folder, file=file: cut(folder / file, 0.5), file) for file in FILES},
    **{str(wrong): (description(**wrong), MODEL_FILE) for wrong in WRONG_DESCRIPTIONS},
    "description of another sort": (lambda folder: (folder / MODEL_FILE).write_text("[1, 2]"), MODEL_FILE),
    "description not UTF-8": (lambda folder: (folder / MODEL_FILE).write_bytes(b'{"\xff": 1}'), MODEL_FILE),
    "weights empty": (lambda folder: (folder / WEIGHTS_FILE).write_bytes(b""), WEIGHTS_FILE),
    "words that are numbers": (lambda folder: (folder / WORDS_FILE).write_text("[1, 2]"), WORDS_FILE),
    "a word twice": (lambda folder: (folder / WORDS_FILE).write_text(json.dumps(["ship"] * 15)), WORDS_FILE),
    "a word less": (lambda folder: (folder / WORDS_FILE).write_text(json.dumps(["ship"])), TENSORS_FILE),
    "a label less": (description(labels=["a", "b"]), WEIGHTS_FILE),
    "no vectors": (description(vectors=False), WEIGHTS_FILE),
    "a term less": (terms(lambda terms: terms[1:]), WEIGHTS_FILE),
    "a term twice": (terms(lambda terms: [terms[0], *terms[:-1]]), MODEL_FILE),
    "a term that is a number": (terms(lambda terms: [1, *terms[1:]]), MODEL_FILE),
    "terms as one string": (terms(lambda terms: "x" * len(terms)), MODEL_FILE),
    "a tensor less": (tensors(lambda values: values.pop("bias")), WEIGHTS_FILE),
    "a row less": (tensors(lambda values: values.update(weights=values["weights"][1:])), WEIGHTS_FILE),
    "a bias of another shape": (tensors(lambda values: values.update(bias=values["bias"][None])), WEIGHTS_FILE),
    "NaN": (tensors(lambda values: values["weights"].__setitem__((0, 0), np.nan)), WEIGHTS_FILE),
    "infinity": (tensors(lambda values: values["adjustment"].__setitem__(0, np.inf)), WEIGHTS_FILE),
    "double precision": (tensors(lambda values: values.update(bias=values["bias"].astype(np.float64))), WEIGHTS_FILE),
    "whole numbers": (tensors(lambda values: values.update(bias=values["bias"].astype(np.int64))), WEIGHTS_FILE),
    "vectors in one row": (tensors(lambda values: values.update(vectors=values["vectors"].ravel()), TENSORS_FILE), TENSORS_FILE),
    "vectors with NaN": (tensors(lambda values: values["vectors"].__setitem__((0, 0), np.nan), TENSORS_FILE), TENSORS_FILE),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damaged_file_is_named_by_an_error(damage: str, copied: Path) -> None:
    do, file = DAMAGES[damage]
    do(copied)
    with pytest.raises(ArtifactError) as error:
        LinearModel.load(copied)
    message = str(error.value)
    assert file in message
    assert str(copied) in message
    assert message.endswith("; delete the folder and build it again") or "missing; pass the folder of a linear model" in message


@pytest.mark.parametrize("file", FILES)
def test_a_file_that_the_disk_refuses_is_an_environment_fault(file: str, copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Path.read_bytes

    def read(path: Path) -> bytes:
        if path.name == file:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return plain(path)

    monkeypatch.setattr(Path, "read_bytes", read)
    with pytest.raises(EnvironmentFault, match=re.escape(file)):
        LinearModel.load(copied)


def test_text_vectors_are_joined_to_the_terms_of_many_texts_in_little_memory() -> None:
    numbers = np.random.default_rng(0)
    vectors = numbers.normal(size=(20_000, 64)).astype(np.float32)
    vectors[::7] = 0
    rows = scipy.sparse.random(20_000, 1_000, 0.02, format="csr", dtype=np.float32, random_state=1)
    expected = scipy.sparse.hstack([rows, scipy.sparse.csr_matrix(np.float32(0.5) * vectors)], format="csr", dtype=np.float32)
    size = expected.data.nbytes + expected.indices.nbytes
    tracemalloc.start()
    joined = beside(rows, vectors, 0.5)
    assert tracemalloc.get_traced_memory()[1] < 2.5 * size
    tracemalloc.stop()
    assert all((getattr(joined, name) == getattr(expected, name)).all() for name in ("data", "indices", "indptr"))
