"""Labels as words that fill in a mask, by the public command: fit, evaluate and predict agree, and with transformers' own masked model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import cramlm
from cramlm.cli import models
from cramlm.cli.options import resolve_run
from cramlm.errors import ArtifactError, UsageError
from cramlm.export.onnx import export_onnx
from cramlm.inference.explain import explain_at
from cramlm.model.initialisation import initialise
from cramlm.model.prompts import PROMPT_FILE, VECTORS_FILE
from cramlm.records import Event
from cramlm.retrieval.selection import SelectionTable
from cramlm.serving.batching import load_model
from damaging import edit_json
from jsonl import read_json, read_jsonl
from pretrained_folders import write_pretrained
from tiny_task import COMMON, QUICK, TOPICS, write_task

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # raised inside transformers while it loads

SMALL = ("encoder.layers=1", "encoder.hidden=32", "encoder.heads=2", "encoder.intermediate=32", "tokenizer.vocab_size=200")
WORDS = 'head.prompt.words={sea=["ship","wave"],hill="ridge"}'
TWO = 'head.prompt.patterns=["{mask}: {text}","Of the {mask}. {text} ({mask})"]'
CASES = {
    "given": (WORDS, 'head.prompt.patterns=["{mask}: {text}","{text} It was of the {mask}."]'),
    "chosen": ("head.prompt.words_per_label=2",),
    "composed": (
        'head.prompt.patterns=["the {mask} of {mask}: {text}"]',
        'head.prompt.words={sea=["old",["ship","wave"]],hill=["old","ridge"]}',
    ),
    "soft-prompt": (WORDS, "head.prompt.vectors=3"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths: the files of a tiny task, a checkpoint of BERT's shape, a store for all runs."""
    root = tmp_path_factory.mktemp("prompts")
    texts = [" ".join((*words, *COMMON, "It", ". : ( )")) for words in TOPICS.values()]
    checkpoint = write_pretrained(root / "checkpoint", "bert", texts * 4)
    return {**write_task(root / "data", train=24, held_out=8, documents=60), "init": str(checkpoint), "store": str(root / "store")}


def fit(place: dict[str, str], out: Path, recipe: str, *settings: str, scratch: bool = False) -> tuple[cramlm.Run, list[Event]]:
    """A run of a few steps, on the checkpoint or from scratch."""
    task = {name: place[name] for name in ("train", "dev", "test")}
    common: dict[str, Any] = {"task": task, "corpus": [place["corpus"]], "budget": None, "seed": 3}
    common["init"] = None if scratch else place["init"]
    phases = len(resolve_run(recipe, None, [], **common).phases)
    steps = [
        f"phases[{number}].{setting}" for number in range(phases) for setting in ("steps=3", "max_length=24", "batch_size=64", "keep=last")
    ]
    config = resolve_run(recipe, None, [*QUICK, *(SMALL if scratch else ()), *steps, *settings], **common)
    events: list[Event] = []
    return cramlm.fit(config, out=out, store=place["store"], emit=events.append), events


def predicted(run: cramlm.Run, place: dict[str, str], out: Path) -> np.ndarray[Any, Any]:
    """Probabilities (texts, labels) of the test texts by `cramlm predict`, labels in alphabetical order."""
    models.predict(run.export, place["test"], out=out)
    predictions = [row["probabilities"] for row in read_jsonl(out)]
    return np.array([[prediction[label] for label in ("hill", "sea")] for prediction in predictions])


def by_transformers(folder: Path, texts: list[str]) -> np.ndarray[Any, Any]:
    """The same from prompt.json and AutoModelForMaskedLM, one text at a time."""
    import transformers

    prompt = read_json(folder / PROMPT_FILE)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    vectors = load_file(folder / VECTORS_FILE)["vectors"] if prompt["vectors"] else torch.zeros(0, model.config.hidden_size)
    predictions = []
    for text in texts:
        scores = []
        for pattern in prompt["patterns"]:
            filled = pattern.replace("{mask}", tokenizer.mask_token).replace("{text}", text)
            ids = tokenizer(filled, return_tensors="pt").input_ids
            words = model.get_input_embeddings()(ids)
            whole = torch.cat([words[:, :1], vectors[None], words[:, 1:]], dim=1)
            with torch.no_grad():
                logits = model(inputs_embeds=whole).logits[0].log_softmax(-1)
            slots = (ids[0] == tokenizer.mask_token_id).nonzero()[:, 0] + len(vectors)
            scores.append([_score(logits, slots, prompt["words"][label], tokenizer) for label in prompt["labels"]])
        predictions.append((torch.tensor(scores).mean(0) + torch.tensor(prompt["shift"])).softmax(-1).numpy())
    return np.array(predictions)


def _score(logits: torch.Tensor, slots: torch.Tensor, words: list[list[str]], tokenizer: Any) -> float:
    ids = [tokenizer.convert_tokens_to_ids(slot) for slot in words]
    return sum(float(logits[place, numbers].mean()) for place, numbers in zip(slots, ids, strict=True))


@pytest.mark.parametrize("kind", ["given", "composed", "soft-prompt", pytest.param("chosen", marks=pytest.mark.slow)])
def test_fit_evaluate_and_predict_agree_with_each_other_and_with_transformers(
    kind: str, place: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, events = fit(place, tmp_path / "run", "soft-prompt" if kind == "soft-prompt" else "prompt", *CASES[kind])
    predictions = predicted(run, place, tmp_path / "predictions.jsonl")
    texts = [row["text"] for row in read_jsonl(place["test"])]
    np.testing.assert_allclose(predictions, by_transformers(run.export, texts), atol=1e-4, rtol=0)
    stored = [
        json.loads(line)["probabilities"] for line in (run.path / "evaluation/predictions-test.jsonl").read_text("utf-8").splitlines()
    ]
    np.testing.assert_allclose(predictions, [[row["hill"], row["sea"]] for row in stored], atol=2e-6, rtol=0)
    served = load_model(run.export, None)
    np.testing.assert_allclose(served.compute(texts, [None] * len(texts)).values, predictions, atol=1e-5, rtol=0)
    assert served.compute(["wave " * 100], [None]).lengths[0] > 100
    capsys.readouterr()
    models.evaluate(run.export, place["test"], as_json=True)
    assert json.loads(capsys.readouterr().out)["macro_f1"] == pytest.approx(run.scores["models"][run.config.name]["test"]["macro_f1"])
    assert np.ptp(predictions[:, 0]) > 1e-4  # texts matter
    assert ("chosen from the training texts" in "".join(event.message for event in events)) == (kind == "chosen")

    before, after = (load_file(folder / "model.safetensors") for folder in (Path(place["init"]), run.export))
    same = [name for name in before if name in after and torch.equal(before[name].view(torch.int32), after[name].view(torch.int32))]
    assert (len(same) == len(after)) == (kind == "soft-prompt")
    if kind == "soft-prompt":
        initial = torch.nn.Parameter(torch.empty(3, 32))
        initialise("prompt_head.vectors", initial, seed=3, std=run.config.encoder.init_std)
        assert 1e-3 < float((load_file(run.export / VECTORS_FILE)["vectors"] - initial.detach()).abs().max()) < 0.1


def test_the_recipe_from_scratch_learns_labels_and_soft_labels_through_patterns(place: dict[str, str], tmp_path: Path) -> None:
    settings = ('head.prompt.patterns=["{mask}: {text}","{text} ({mask})"]', "phases[0].masking.kind=whole-word", "phases[0].dropout=0.1")
    run, events = fit(place, tmp_path / "run", "prompt", *settings, scratch=True)
    steps = [event.data for event in events if event.kind == "step" and event.stage == "phase-1-joint"]
    assert {"mlm_external", "mlm_task", "classify_task", "distil_external"} <= set(steps[-1])
    (soft,) = (np.load(file) for file in (run.path / "teacher").glob("passages-*.npy"))
    assert len(soft) >= len(SelectionTable.open(run.path / "selection"))
    np.testing.assert_allclose(soft.sum(axis=1), 1, atol=1e-5)
    prompt = read_json(run.path / "prompt/prompt.json")
    assert {word for (slot,) in prompt["words"].values() for word in slot} <= {word for words in TOPICS.values() for word in words}
    shift = read_json(run.path / "logit-adjustment/logit-adjustment.json")["values"]
    assert read_json(run.export / PROMPT_FILE) == prompt | {"shift": [shift["hill"], shift["sea"]]}
    assert not (run.export / "mlm").exists()
    card = (run.export / "README.md").read_text("utf-8")
    assert "pipeline does not:" in card
    assert "pipeline_tag: fill-mask" in card
    explanation = explain_at(run.export, "wave ship harbour " * 20, model_part="encoder")
    assert 0 < explanation.read < len(explanation.text)
    with pytest.raises(UsageError, match=r"a model with a prompt \(prompt\.json\) cannot be exported"):
        export_onnx(run.export)
    _, events = fit(place, tmp_path / "run", "prompt", *settings, scratch=True)
    assert not [event for event in events if event.kind == "stale"]

    again = resolve_run("prompt", None, [], task={"train": place["train"]}, corpus=None, budget=None, seed=None, init=str(run.export))
    assert (again.encoder.hidden, again.encoder.shape) == (32, run.config.encoder.shape)

    edit_json(run.export / PROMPT_FILE, words=prompt["words"] | {"sea": [["harbourmaster"]]})
    with pytest.raises(ArtifactError):
        cramlm.Predictor.load(run.export)


def test_the_last_phase_learns_from_the_ensembles_soft_labels_of_passages(place: dict[str, str], tmp_path: Path) -> None:
    run, events = fit(place, tmp_path / "run", "pet", *CASES["given"])
    labelled = next(event.message for event in events if event.stage == "teacher-of-distil" and event.kind == "done")
    predictions = np.load(run.path / "teacher-of-distil/passages.npy")
    assert f"soft labels of the model of phase finetune: {len(predictions):,} texts" in labelled
    np.testing.assert_allclose(predictions.sum(1), 1, atol=1e-5)
    last = [event.data for event in events if event.kind == "step" and event.stage == "phase-2-distil"][-1]
    assert {"mlm_external", "classify_task", "distil_external"} <= set(last)
    assert not (run.path / "teacher").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (['head.prompt.words={sea="ship"}'], "the label 'hill' has no words"),
        (['head.prompt.words={sea="ship",hill="ridge",lake="reef"}'], "'lake' is no label of the training texts ('hill', 'sea')"),
        (['head.prompt.words={sea="ships",hill="ridge"}'], "'ships' is 2 tokens of the vocabulary (ship ##s); similar single tokens: ship"),
        (['head.prompt.words={sea="ship",hill="Ship"}'], "have the same tokens"),
        (["head.prompt.words={sea=[],hill=[]}"], "label 'sea': needs words for each of 1 {mask}, got ()"),
        (
            ['head.prompt.words={sea="ship",hill=[["x",3]]}'],
            "head.prompt.words: label 'hill': expected a word, a list of words, or a list of",
        ),
        (['head.prompt.words={sea="ship",hill=["ship"]}'], "labels 'sea' and 'hill' have the same words"),
        (['head.prompt.patterns=["{text} is good"]'], "pattern '{text} is good': has no {mask}"),
        (['head.prompt.patterns=["{text} {mask} {topic}"]'], "{topic} is not a field; fields are {mask} {text} {text_a}"),
        (['head.prompt.patterns=["{text} {mask} }"]'], "an unmatched brace"),
        (['head.prompt.patterns=["{mask}"]'], "needs {text} once, or {text_a} and {text_b} once each"),
        (['head.prompt.patterns=["{text_a} {mask} {text_b}"]'], "must contain {text}, as the task has single texts"),
        (['head.prompt.patterns=["{text} {mask} {mask}"]'], "patterns with 2 {mask} need words for every label"),
        ([TWO], "patterns must have equal numbers of {mask}: 1 in '{mask}: {text}', 2 in 'Of the {mask}"),
        ([f'head.prompt.patterns=["{"the old " * 12} {{mask}} {{text}}"]'], "of the 24 tokens of a sequence, which leaves fewer than 4"),
        (["phases[0].trains=vectors"], "trains = 'vectors' needs a soft prompt"),
        (
            ['phases[0].terms=[{kind="span_infilling",on="task"},{kind="classify"}]'],
            "the term 'span_infilling' is incompatible with a prompt",
        ),
        (['phases[0].terms=[{kind="classify"},{kind="distil",on="task",teacher="joint"}]'], "teacher 'joint' is not an earlier phase"),
        (["head.token_classifier=true"], "head.token_classifier and head.generator have no effect"),
    ],
)
def test_an_invalid_prompt_is_refused_in_one_line(settings: list[str], message: str, place: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        fit(place, tmp_path / "run", "prompt", *settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
