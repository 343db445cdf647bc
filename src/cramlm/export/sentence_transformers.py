"""Export an encoder as a folder that the package sentence-transformers loads: `SentenceTransformer("runs/mine/sentence-transformers")`.

    modules.json                          the two modules: the encoder in this folder, and the pooling in 1_Pooling/
    1_Pooling/config.json                 [CLS] or the mean over all tokens, as the classifier pools
    sentence_bert_config.json             the longest text in tokens
    config_sentence_transformers.json     no prompts; vectors are compared by their cosine
    config.json, model.safetensors        the encoder without its classifier
    tokenizer.json, tokenizer_config.json copies

The layout is that of sentence-transformers' `SentenceTransformer.save`. Before the folder is published, transformers loads it, and the
vectors of held-out texts must equal those of the model. The same folder is an encoder for dense retrieval (`retriever.encoder`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.torch import load

from cramlm.errors import ArtifactError, UsageError, counted
from cramlm.inference.folders import folder_of_form, model_of, texts_for_check
from cramlm.inference.onnx import GRAPH_FILE
from cramlm.inference.predictor import Predictor
from cramlm.linear.files import is_linear
from cramlm.model.huggingface.config import CONFIG_FILE, TOKENIZER_CONFIG_FILE, WEIGHTS_FILE, read_json
from cramlm.model.prompts import PROMPT_FILE
from cramlm.model.sentences import SentenceEncoder
from cramlm.model.tokenizer import TOKENIZER_FILE
from cramlm.records import Emit, Event, Example, silent
from cramlm.storage.arrays import unit_vectors
from cramlm.storage.artifacts import Artifact, hash_file, hash_json, refuse_foreign
from cramlm.storage.stages import stage
from cramlm.storage.tensors import save_tensors

KIND: Final = "sentence-transformers"
CODE_FORMAT: Final = 1  # raise it when the same model would give another folder
LARGEST_DIFFERENCE: Final = 1e-4
POOLING_FOLDER: Final = "1_Pooling"
_CLASSIFIER_TENSORS: Final = ("classifier.", "head.")  # prefixes of their names, in all shapes of the encoder
_CLASSIFIER_FIELDS: Final = ("id2label", "label2id", "problem_type")
_MODES: Final = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")


def export_sentence_encoder(
    path: Path, *, out: Path | None = None, texts: Sequence[Example] | None = None, emit: Emit = silent
) -> Artifact:
    """Publish `path` (a run or an exported encoder) as a sentence encoder, or keep the existing one of the same model and texts.

    out: by default `sentence-transformers` in the run, or beside a model outside of a run. texts: up to 200 to check the vectors on; by
    default the run's dev and test texts.

    Raises:
        UsageError: if the model has no text vectors, there are no texts for the check, or `out` holds something else. ArtifactError: if
        there is no model at `path`, or the folder gives other vectors (nothing is published).
    """
    folder = model_of(path)
    _refuse(folder)
    probes = [example.text for example in texts_for_check(path, texts, of="its vectors")]
    target = out or folder_of_form(path, KIND)
    predictor = Predictor.load_encoder(folder)
    predictor.trained_on_pairs = None  # a sentence encoder reads each text of a pair alone

    def write(temporary: Path) -> None:
        emit(Event("start", KIND))
        _write(folder, temporary, predictor)
        expected = unit_vectors(predictor.embeddings(probes))
        vectors = SentenceEncoder(temporary, max_length=predictor.max_length, pooling=predictor.pooling, device="cpu").encode(probes)
        difference = float(np.abs(vectors - expected).max())
        if not difference <= LARGEST_DIFFERENCE:  # so that NaN is refused too
            raise ArtifactError(
                f"{target}: its vectors differ by {difference:.1e} from the model's (at most {LARGEST_DIFFERENCE:.0e} allowed); "
                "nothing was published, please report this"
            )
        message = f"{expected.shape[1]} dimensions, pooling {predictor.pooling}"
        emit(Event("done", KIND, f"{target}: {message}, vectors within {difference:.0e} on {counted(len(probes), 'text')}"))

    refuse_foreign(target, kind=KIND)
    files = {name: hash_file(folder / name) for name in (CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FILE, TOKENIZER_CONFIG_FILE)}
    key = {"code_format": CODE_FORMAT, "model": hash_json(files), "texts": hash_json(probes)}
    return stage(target, kind=KIND, key=key, write=write, emit=emit)


def _refuse(folder: Path) -> None:
    """Raise UsageError unless the folder holds an encoder with text vectors for which transformers has a class."""
    remedy = "pass the run of an encoder, or the folder that it exported"
    if is_linear(folder):
        raise UsageError(f"{folder}: a linear model, which sentence-transformers cannot load; {remedy}")
    if (folder / GRAPH_FILE).is_file():
        raise UsageError(f"{folder}: an ONNX folder gives logits only, no text vectors; {remedy}")
    if (folder / PROMPT_FILE).is_file():
        raise UsageError(f"{folder}: a model with a prompt reads the word at its mask, it has no text vectors; {remedy} without a prompt")
    if read_json(folder / CONFIG_FILE).get("model_type") == "cramlm-moe":
        raise UsageError(f"{folder}: transformers has no class for a mixture of experts; export another shape")


def _write(folder: Path, target: Path, predictor: Predictor) -> None:
    config = {name: value for name, value in read_json(folder / CONFIG_FILE).items() if name not in _CLASSIFIER_FIELDS}
    config["architectures"] = [name.replace("ForSequenceClassification", "Model") for name in config["architectures"]]
    tensors = load((folder / WEIGHTS_FILE).read_bytes())
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(_CLASSIFIER_TENSORS)}
    save_tensors(target / WEIGHTS_FILE, kept, metadata={"format": "pt"})
    for name in (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE):
        shutil.copyfile(folder / name, target / name)
    modes = dict.fromkeys((f"pooling_mode_{mode}" for mode in _MODES), False)
    modes["pooling_mode_cls_token" if predictor.pooling == "cls" else "pooling_mode_mean_tokens"] = True
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": POOLING_FOLDER, "type": "sentence_transformers.models.Pooling"},
    ]
    (target / POOLING_FOLDER).mkdir()
    contents: dict[str, Any] = {
        CONFIG_FILE: config,
        "modules.json": modules,
        f"{POOLING_FOLDER}/config.json": {"word_embedding_dimension": predictor.width, **modes, "include_prompt": True},
        "sentence_bert_config.json": {"max_seq_length": predictor.max_length, "do_lower_case": False},
        "config_sentence_transformers.json": {"prompts": {}, "default_prompt_name": None, "similarity_fn_name": "cosine"},
    }
    for name, content in contents.items():
        (target / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")
