from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import model_fixtures
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cramlm.model.huggingface import folder as hf
from cramlm.model.model import Model, ModelSpec, build_model
from cramlm.model.operations import Dropout
from cramlm.model.tokenizer import Tokenizer
from jsonl import read_json

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # raised inside transformers while it loads

LABELS = ("007", "negative", "très bien")
TORTURE = [
    "",
    " ",
    "plain words",
    "日本語の文章です。東京タワー",
    "中文 没有空格",
    "ภาษาไทยไม่มีช่องว่าง",
    "ພາສາລາວ ភាសាខ្មែរ မြန်မာ",
    "한국어 문장",
    "אבג שלום עולם",
    "مرحبا بالعالم",
    "अंग्रेज़ी वाक्य",
    "👨\u200d👩\u200d👧\u200d👦 family ❤️ 🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
    "e\u0301 and é, a\u0323\u0307",
    "abc\u202edef\u2066",
    "nul\x00 bell\x07 esc\x1b[0m del\x7f",
    "tab\tline\r\nnext\x0b\x0c\x85\u2028",
    "[MASK] [SEP] [CLS] [PAD] [UNK]",
    "x[MASK]y",
    "<s> </s> <mask> <pad>",
    "<<a>> [[b]] {{c}} -- --- ==== !!!",
    "x" * 10_000,
    "word " + "é" * 101,
    "\u0301" * 300,
    "İstanbul ẞ ǅ ﬁ ½ ①",
    "1,234.56 3e-5 p53 COX-2",
    "\ufeffbom soft\xadhyphen zero\u200bwidth join\u200der",
    "\U000e0041tags \ue000private",
    "naïve Café RÉSUMÉ",
    " \xa0 \u3000 ",
]


@pytest.fixture(params=list(model_fixtures.SHAPES))
def model(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> Model:
    encoder, head = model_fixtures.SHAPES[request.param]
    return scrambled(build_model(ModelSpec(encoder, head, vocab_size=tokenizer.vocab_size, labels=len(LABELS)), seed=11))


def scrambled(model: Model) -> Model:
    """Every weight random, norms and biases too, so that a swapped or forgotten one shows."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def our_logits(model: Model, tokenizer: Tokenizer, texts: list[str], *, max_length: int = 64) -> np.ndarray[Any, Any]:
    batch = model_fixtures.packed(tokenizer.sequences(texts, max_length=max_length, cut="truncate"), per_row=3)
    with torch.no_grad():
        return model.task_logits(model.hidden(batch), batch).numpy()


def test_transformers_gives_our_logits_for_100_texts(model: Model, tokenizer: Tokenizer, tmp_path: Path) -> None:
    import transformers

    hf.save_classifier(model, tokenizer, tmp_path, labels=LABELS, max_length=64)
    native = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    native_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    family = {"bert": "Bert", "modernbert": "ModernBert", "albert": "Albert"}[model.encoder_config.shape]
    assert type(native).__name__ == f"{family}ForSequenceClassification"
    assert native.dtype == torch.float32
    assert native.config.id2label == dict(enumerate(LABELS))
    texts = model_fixtures.sentences(100 - len(TORTURE), seed=8, longest=60) + TORTURE
    inputs = native_tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
    assert set(inputs) == {"input_ids", "attention_mask"}
    with torch.no_grad():
        theirs = native(**inputs).logits.numpy()
    ours = our_logits(model, tokenizer, texts)
    assert np.abs(ours).max() > 0.1
    np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)
    classify = transformers.pipeline("text-classification", model=native, tokenizer=native_tokenizer, device="cpu")
    predictions = classify(texts, truncation=True)
    assert [each["label"] for each in predictions] == [LABELS[index] for index in ours.argmax(1)]


def test_transformers_gives_our_vocabulary_logits(model: Model, tokenizer: Tokenizer, tmp_path: Path) -> None:
    import transformers

    hf.save_mlm(model, tokenizer, tmp_path, max_length=64)
    native = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)
    tokens = tokenizer.sequences(model_fixtures.sentences(30, seed=9), max_length=40, cut="truncate")
    ids, mask = model_fixtures.padded([tokens[index].tolist() for index in range(len(tokens))])
    with torch.no_grad():
        theirs = native(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask)).logits.numpy()
        batch = model_fixtures.packed(tokens, per_row=3)
        real = (batch.sequence.flatten() >= 0).nonzero().squeeze(1)
        ours = model.mlm_logits(model.hidden(batch), real).numpy()
    np.testing.assert_allclose(ours, theirs[mask.astype(bool)], atol=2e-5, rtol=0)
    fill = transformers.pipeline("fill-mask", model=native, tokenizer=transformers.AutoTokenizer.from_pretrained(tmp_path), device="cpu")
    assert len(fill("the river [MASK] flows", top_k=2)) == 2


def test_dropout_gives_the_mean_and_variance_of_transformers_bert_in_training(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The samplers differ, so outputs are compared by their moments over many passes."""
    import transformers

    rate, attention_rate = 0.1, 0.3
    encoder, head = model_fixtures.SHAPES["bert"]
    model = scrambled(build_model(ModelSpec(encoder, head, vocab_size=tokenizer.vocab_size, labels=2), seed=11))
    hf.save_classifier(model, tokenizer, tmp_path, labels=["a", "b"], max_length=64)
    rates = {"hidden_dropout_prob": rate, "attention_probs_dropout_prob": attention_rate}
    native = transformers.BertModel.from_pretrained(tmp_path, attn_implementation="eager", **rates).train()
    tokens = tokenizer.sequences(["the river flows slowly under the old stone bridge"], max_length=40, cut="truncate")
    batch, ids = model_fixtures.packed(tokens, per_row=1, padding=0), torch.from_numpy(tokens[0].astype(np.int64))[None]
    passes = 800
    with torch.no_grad():
        ours = torch.stack([model.hidden(batch, dropout=Dropout(rate, seed, attention_rate=attention_rate)) for seed in range(passes)])
        torch.manual_seed(0)
        theirs = native(input_ids=ids.expand(passes, -1)).last_hidden_state
    deviation = theirs.var(0).sqrt()
    assert deviation.min() > 0.01
    assert ((ours.mean(0) - theirs.mean(0)).abs() / deviation).max() < 6 * (2 / passes) ** 0.5  # standard errors of a difference
    assert float(ours.var(0).sum() / theirs.var(0).sum()) == pytest.approx(1, abs=0.04)


@pytest.mark.parametrize("kind", ["tokenizer", "bpe_tokenizer"])
def test_transformers_tokenizer_gives_our_ids_for_every_script_and_literal_special_tokens(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    import transformers

    tokenizer: Tokenizer = request.getfixturevalue(kind)
    for name in ("bert", "modernbert-mean"):
        encoder, head = model_fixtures.SHAPES[name]
        model = build_model(ModelSpec(encoder, head, vocab_size=tokenizer.vocab_size, labels=2), seed=0)
        hf.save_classifier(model, tokenizer, tmp_path / name, labels=["a", "b"], max_length=24)
        native = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        assert native.model_max_length == 24
        texts = [*TORTURE, *[unicodedata.normalize("NFD", text) for text in TORTURE], *model_fixtures.sentences(40, seed=10, longest=50)]
        ours = tokenizer.sequences(texts, max_length=24, cut="truncate")
        assert native(texts, truncation=True)["input_ids"] == [ours[index].tolist() for index in range(len(texts))]
        others = texts[::-1]
        paired = tokenizer.sequences(texts, others, max_length=24, cut="truncate")
        encoded = native(texts, others, truncation=True)
        assert encoded["input_ids"] == [paired[index].tolist() for index in range(len(texts))]
        assert "token_type_ids" not in encoded


def test_a_saved_classifier_loads_with_equal_weights_labels_and_predictions(model: Model, tokenizer: Tokenizer, tmp_path: Path) -> None:
    for name in ("one", "two"):
        hf.save_classifier(model, tokenizer, tmp_path / name, labels=LABELS, max_length=48)
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes(), file.name
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {file.name for file in (tmp_path / "one").iterdir()} == names
    ids = read_json(tmp_path / "one" / "config.json")["label2id"]
    assert ids == {label: index for index, label in enumerate(LABELS)}
    loaded = hf.load_classifier(tmp_path / "one")
    assert (loaded.labels, loaded.max_length, loaded.tokenizer.fingerprint) == (LABELS, 48, tokenizer.fingerprint)
    assert (loaded.model.encoder_config, loaded.model.head_config) == (model.encoder_config, model.head_config)
    parameters = dict(loaded.model.named_parameters())
    for name, parameter in model.named_parameters():
        assert name.startswith("mlm_head.") or torch.equal(parameter, parameters[name]), name
    texts = model_fixtures.sentences(20, seed=12)
    np.testing.assert_array_equal(our_logits(loaded.model, loaded.tokenizer, texts), our_logits(model, tokenizer, texts))


def test_a_folder_that_transformers_saved_again_or_with_the_names_of_5_0_loads(model: Model, tokenizer: Tokenizer, tmp_path: Path) -> None:
    import transformers

    hf.save_classifier(model, tokenizer, tmp_path / "ours", labels=LABELS, max_length=64)
    transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    transformers.AutoTokenizer.from_pretrained(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    tensors = load_file(tmp_path / "ours" / hf.WEIGHTS_FILE)
    for name in list(tensors):
        tensors[name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")] = tensors.pop(name)
    save_file(tensors, tmp_path / "ours" / hf.WEIGHTS_FILE)
    texts = model_fixtures.sentences(10, seed=13)
    for folder in ("theirs", "ours"):
        loaded = hf.load_classifier(tmp_path / folder)
        np.testing.assert_array_equal(our_logits(loaded.model, loaded.tokenizer, texts), our_logits(model, tokenizer, texts))


def test_a_saved_language_model_loads_with_a_new_classifier(model: Model, tokenizer: Tokenizer, tmp_path: Path) -> None:
    hf.save_mlm(model, tokenizer, tmp_path, max_length=48)
    loaded, _, max_length = hf.load_mlm(tmp_path, head=model.head_config, labels=5, seed=2)
    assert max_length == 48
    new = build_model(ModelSpec(model.encoder_config, model.head_config, vocab_size=tokenizer.vocab_size, labels=5), seed=2)
    parameters, initial = dict(model.named_parameters()), dict(new.named_parameters())
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, initial[name] if name.startswith("classifier.") else parameters[name]), name
