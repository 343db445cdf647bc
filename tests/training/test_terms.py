"""Every text term of a phase: what its batches hold, its loss, and the contracts of the loop for each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from training_fixtures import (
    SPECIAL,
    VOCABULARY,
    assert_same_bits,
    make_batches,
    make_model,
    make_phase,
    make_pool,
    run_phase,
    stop_after,
    weights_of,
)

from cramlm.config.head import HeadConfig
from cramlm.config.phase import PhaseConfig
from cramlm.config.run import RunConfig, TaskConfig
from cramlm.errors import Stopped
from cramlm.model.model import Model, PackedBatch
from cramlm.records import Batch
from cramlm.training.batching import Batches
from cramlm.training.objective import gradients, in_parts, objective_of
from cramlm.training.sequences import TokenPool, share_of_batch
from cramlm.training.terms.base import VocabularyTerm
from cramlm.training.terms.replaced_tokens import replace_tokens, sample_tokens

OBJECTIVES: dict[str, dict[str, Any]] = {
    "causal": {"text": "causal", "label_weight": 0.0},
    "hybrid": {"text": "causal", "of_text": {"share": 0.5}},
    "replaced_tokens": {"text": "replaced_tokens", "masking": {"rate": 0.3}},
    "span_infilling": {"text": "span_infilling", "masking": {"rate": 0.3, "mean_span": 2.0}, "max_length": 56},
    "shuffled_tokens": {"text": "shuffled_tokens", "masking": {"rate": 0.3}},
    "candidates": {"candidates": 48},
    "phrase": {"masking": {"kind": "phrase"}},
    "experts": {},
    "albert": {},
}
PLAIN: dict[str, dict[str, Any]] = {
    "mlm": {},
    "mean scale": {"loss_scale": "mean"},
    "labels": {"external": 0, "text_weight": 0.0, "label_smoothing": 0.1},
}
SHAPES = {"experts": "moe", "albert": "albert"}


def phase_of(objective: str, **changes: Any) -> PhaseConfig:
    return make_phase(**(OBJECTIVES | PLAIN)[objective] | changes)


def model_of(*, seed: int = 7, shape: str = "modernbert") -> Model:
    """With a generator, whatever the phase."""
    return make_model(seed=seed, shape=shape, generator=16)


def pool_of_words(sequences: int, *, labelled: bool, seed: int) -> TokenPool:
    pool = make_pool(sequences, labelled=labelled, seed=seed)
    return replace(pool, begins=np.random.default_rng(seed).random(len(pool.ids)) < 0.7)


def batches_of(phase: PhaseConfig, *, seed: int = 7) -> Batches:
    pools = pool_of_words(90, labelled=False, seed=1), pool_of_words(40, labelled=True, seed=2)
    return Batches(phase, *pools, seed=seed, phase_index=0, special=SPECIAL)


def step_where(phase: PhaseConfig, *, causal: bool) -> Batch:
    return next(batch for batch in map(batches_of(phase).batch, range(20)) if bool(len(batch.causal_from)) == causal)


def text_of(batch: Batch, number: int) -> list[int]:
    return batch.token_ids.ravel()[batch.sequence.ravel() == number].tolist()


def test_every_position_but_the_last_predicts_the_next_token_without_labels() -> None:
    batch = step_where(phase_of("hybrid"), causal=True)
    targets = dict(zip(batch.masked.tolist(), batch.mlm_labels.tolist(), strict=True))
    for number, first in enumerate(batch.first.tolist()):
        text = text_of(batch, number)
        assert [targets[first + position] for position in range(len(text) - 1)] == text[1:]
        assert first + len(text) - 1 not in targets
    assert SPECIAL.mask not in batch.token_ids
    assert (batch.task_labels == -1).all()
    assert (batch.causal_from == 0).all()


def test_a_hybrid_phase_has_causal_steps_by_its_share_and_masks_in_the_others() -> None:
    batches = batches_of(phase_of("hybrid", of_text={"share": 0.25}))
    causal = [bool(len(batches.batch(step).causal_from)) for step in range(200)]
    assert np.mean(causal) == pytest.approx(0.25, abs=0.08)
    assert causal == [bool(len(batches_of(phase_of("hybrid", of_text={"share": 0.25})).batch(step).causal_from)) for step in range(200)]
    masked, plain = step_where(phase_of("hybrid"), causal=False), batches_of(make_phase())
    assert any(np.array_equal(masked.token_ids, plain.batch(step).token_ids) for step in range(20))


def test_later_tokens_change_nothing_before_them_in_a_causal_batch() -> None:
    for shape in ("modernbert", "bert"):
        model, batch = model_of(shape=shape), PackedBatch.of(step_where(phase_of("causal"), causal=True))
        before = model.hidden(batch)
        changed, position = batch.token_ids.clone(), int(batch.first[3]) + 3
        changed.view(-1)[position] = 50 + (int(changed.view(-1)[position]) == 50)
        after = model.hidden(replace(batch, token_ids=changed))
        moved = set((before - after).abs().amax(1).nonzero().flatten().tolist())
        own = (batch.sequence.flatten() == 3).nonzero().flatten().tolist()
        assert moved == {other for other in own if other >= position}


def test_spans_after_the_text_restore_it() -> None:
    phase = phase_of("span_infilling")
    texts = set()
    for pool in (pool_of_words(90, labelled=False, seed=1), pool_of_words(40, labelled=True, seed=2)):
        texts |= {tuple(pool.sequence(number).tolist()) for number in range(len(pool))}
    for step in range(5):
        batch = batches_of(phase).batch(step)
        targets = np.zeros(batch.token_ids.size, dtype=np.int64)
        targets[batch.masked] = batch.mlm_labels
        for number, first in enumerate(batch.first.tolist()):
            tokens, text = text_of(batch, number), int(batch.causal_from[number])
            spans: list[list[int]] = []
            for position in range(text, len(tokens)):
                if tokens[position] == SPECIAL.mask:
                    spans.append([])
                target = int(targets[first + position])
                if target != SPECIAL.sep:
                    assert tokens[position + 1] == target
                    spans[-1].append(target)
            waiting = iter(spans)
            restored = [token for each in tokens[:text] for token in (next(waiting) if each == SPECIAL.mask else [each])]
            assert tuple(restored) in texts
            assert next(waiting, None) is None
            hidden = sum(map(len, spans))
            assert hidden == max(1, round(0.3 * (len(restored) - 2)))


def test_span_positions_attend_to_the_text_and_earlier_span_positions_and_the_text_to_itself() -> None:
    model, batch = model_of(), PackedBatch.of(batches_of(phase_of("span_infilling")).batch(0))
    own = (batch.sequence.flatten() == 2).nonzero().flatten()
    text = int(batch.causal_from[2])
    for position, expected in ((own[text + 1], own[text + 1 :]), (own[2], own)):
        changed = batch.token_ids.clone()
        changed.view(-1)[position] = 50 + (int(changed.view(-1)[position]) == 50)
        difference = (model.hidden(batch) - model.hidden(replace(batch, token_ids=changed))).abs().amax(1)
        assert difference.nonzero().flatten().tolist() == expected.tolist()


@pytest.mark.parametrize("objective", ["causal", "span_infilling", "replaced_tokens"])
def test_a_step_holds_about_batch_size_tokens_with_any_term(objective: str) -> None:
    batches = batches_of(phase_of(objective, batch_size=900))
    tokens = np.mean([batches.batch(step).tokens for step in range(20)])
    assert tokens == pytest.approx(900, rel=0.05)


def test_texts_of_the_longest_length_fit_into_a_row_with_their_spans() -> None:
    for rate in (0.05, 0.15, 0.4, 0.9):
        phase = phase_of("span_infilling", label_weight=0.0, task=0, masking={"rate": rate, "mean_span": 1.0}, max_length=64)
        pool = make_pool(50, shortest=phase.text_length, longest=phase.text_length, labelled=False)
        pool = replace(pool, begins=np.ones(len(pool.ids), dtype=np.bool_))
        batch = Batches(phase, pool, None, seed=1, phase_index=0, special=SPECIAL).batch(0)
        assert batch.token_ids.shape[1] <= 64


def test_tokens_are_sampled_in_proportion_to_their_probabilities() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.2, 0.3]])).repeat(5, 1)
    assert sample_tokens(logits, torch.tensor([0.0, 0.49, 0.51, 0.71, 0.999999])).tolist() == [0, 0, 1, 2, 2]
    many = sample_tokens(logits[:1].repeat(3000, 1), (torch.arange(3000) + 0.5) / 3000)
    assert torch.bincount(many).tolist() == pytest.approx([1500, 600, 900], abs=1)


def test_only_masked_tokens_are_replaced_and_equal_samples_count_as_original() -> None:
    model, phase = model_of(), phase_of("replaced_tokens")
    batch = PackedBatch.of(batches_of(phase).batch(0))
    replaced = replace_tokens(model, batch)
    before, after = batch.token_ids.flatten(), replaced.batch.token_ids.flatten()
    elsewhere = torch.ones(len(before), dtype=torch.bool)
    elsewhere[batch.masked] = False
    assert torch.equal(before[elsewhere], after[elsewhere])
    assert not replaced.is_replaced[elsewhere].any()
    assert torch.equal(replaced.is_replaced[batch.masked], after[batch.masked] != batch.mlm_labels)
    sure = replace(batch, mlm_labels=after[batch.masked])
    assert not replace_tokens(model, sure).is_replaced.any()


@pytest.mark.parametrize(("loss_scale", "divisor"), [("sum", 1.0), ("mean", 1 + 2 + 1 + 8 + 16)])
def test_replaced_token_detection_is_the_weighted_sum_of_its_means(loss_scale: str, divisor: float) -> None:
    model, phase = model_of(), phase_of("replaced_tokens", of_text={"detection_weight": 8.0}, loss_scale=loss_scale)
    batch = PackedBatch.of(batches_of(phase).batch(0))
    result = objective_of(phase).losses(model, batch)
    owner = batch.sequence.flatten()
    real = owner >= 0
    with torch.no_grad():
        replaced = replace_tokens(model, batch)
        hidden = model.hidden(replaced.batch)
        each = functional.binary_cross_entropy_with_logits(
            model.place_head(hidden)[real], replaced.is_replaced[real].float(), reduction="none"
        )
        guessed = functional.cross_entropy(replaced.logits, batch.mlm_labels, reduction="none")
        task = functional.cross_entropy(model.task_logits(hidden, batch)[~batch.external], batch.task_labels[~batch.external])
    expected = {"classify_task": float(task)}
    for name, values, external in (
        ("replaced_tokens", guessed, batch.external[owner[batch.masked]]),
        ("detection", each, batch.external[owner[real]]),
    ):
        expected |= {f"{name}_external": float(values[external].mean()), f"{name}_task": float(values[~external].mean())}
    total = expected["classify_task"]
    for name, weight in (("replaced_tokens", 1), ("detection", 8)):
        total += weight * (expected[f"{name}_external"] + 2 * expected[f"{name}_task"])
    assert result.as_numbers() == pytest.approx(expected | {"loss": total / divisor}, rel=1e-4)
    result.total.backward()
    assert all(parameter.grad is None for parameter in model.mlm_head.parameters())
    assert all(parameter.grad is not None for parameter in model.generator.parameters())


@pytest.mark.parametrize("objective", [*OBJECTIVES, *PLAIN])
def test_parts_and_ranks_have_the_losses_and_the_gradient_of_the_whole_batch(objective: str) -> None:
    phase, model = phase_of(objective), model_of(shape=SHAPES.get(objective, "modernbert"))
    whole = step_where(phase, causal=True) if objective == "hybrid" else batches_of(phase).batch(0)
    counts = objective_of(phase).counts(whole)

    def of(parts: list[PackedBatch]) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        model.zero_grad()
        losses = gradients(model, parts, phase, counts, precision="fp32", dropout_seed=3)
        return losses.as_numbers(), {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}

    terms, expected = of(in_parts(whole, 1))
    several, summed = of(in_parts(whole, 3))
    assert several == pytest.approx(terms, rel=1e-5)
    torch.testing.assert_close(summed, expected, rtol=1e-3, atol=1e-6)
    empty = [objective_of(phase).losses(model, PackedBatch.of(share_of_batch(whole, index, 16)), counts).total for index in range(16)]
    assert float(sum(empty, torch.zeros(())).detach()) == pytest.approx(terms["loss"], rel=1e-5)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_phase_that_was_stopped_ends_with_the_same_bits(objective: str, tmp_path: Path) -> None:
    phase = phase_of(objective, steps=4, dropout=0.2, checkpoint_every=3)
    shape = SHAPES.get(objective, "modernbert")
    straight, resumed = model_of(shape=shape), model_of(seed=99, shape=shape)
    result = run_phase(straight, phase, tmp_path / "straight", batches=batches_of(phase))
    with pytest.raises(Stopped):
        run_phase(model_of(shape=shape), phase, tmp_path / "stopped", batches=batches_of(phase), stop=stop_after(2))
    assert run_phase(resumed, phase, tmp_path / "stopped", batches=batches_of(phase)).executed_flops == result.executed_flops
    assert_same_bits(weights_of(resumed), weights_of(straight))


@pytest.mark.parametrize("objective", ["causal", "replaced_tokens", "shuffled_tokens", "span_infilling"])
def test_a_term_is_learned(objective: str, tmp_path: Path) -> None:
    muon = {"kind": "muon", "learning_rate": 3e-3, "muon_learning_rate": 1e-2}
    phase = phase_of(objective, steps=24, external=0, optimizer=muon, text_weight=1.0)
    events: list[Any] = []
    run_phase(model_of(), phase, tmp_path, batches=batches_of(phase), emit=events.append, evaluate=None)
    steps = [event.data for event in events if event.kind == "step"]
    term = {"replaced_tokens": "detection_task"}.get(objective, f"{objective}_task")
    assert np.mean([step[term] for step in steps[-5:]]) < 0.97 * np.mean([step[term] for step in steps[:5]])


def test_candidates_are_the_tokens_to_predict_and_a_sample_of_the_others_which_stands_for_them() -> None:
    batch = make_batches(make_phase(candidates=48)).batch(0)
    labels, others = np.unique(batch.mlm_labels), VOCABULARY - len(np.unique(batch.mlm_labels))
    assert len(batch.candidates) == 64  # the next multiple
    assert (np.diff(batch.candidates) > 0).all()
    is_label = np.isin(batch.candidates, labels)
    assert is_label.sum() == len(labels)
    np.testing.assert_allclose(batch.stand_for, np.where(is_label, 1.0, others / (64 - len(labels))), rtol=1e-6)
    assert not np.array_equal(batch.candidates, make_batches(make_phase(candidates=48)).batch(1).candidates)
    everything = make_batches(make_phase(candidates=VOCABULARY)).batch(0)
    assert len(everything.candidates) == 0
    many = make_batches(make_phase(candidates=1, batch_size=128)).batch(0)
    assert len(np.unique(many.mlm_labels)) * 1.25 <= len(many.candidates) + 1 < VOCABULARY


@pytest.mark.parametrize("objective", [*OBJECTIVES, *PLAIN])
def test_the_settings_of_a_term_say_whether_candidates_limit_its_softmax(objective: str) -> None:
    phase = make_phase(**{**OBJECTIVES, **PLAIN}[objective])
    limited = {term.kind for term in objective_of(phase).text_terms if isinstance(term, VocabularyTerm)}
    assert limited == {term.kind for term in phase.terms if term.reads_candidates}


def test_the_softmax_over_candidates_estimates_that_over_the_vocabulary_without_bias() -> None:
    model, batches = make_model(), make_batches(make_phase(candidates=48))
    batch = batches.batch(0)
    with torch.no_grad():
        model.encoder.word_embeddings.mul_(20.0)  # logits that differ
        hidden = model.hidden(PackedBatch.of(batch))
        exact = model.mlm_logits(hidden, PackedBatch.of(batch).masked).exp().sum(dim=1)
        term, random = objective_of(batches.phase).text_terms[0], np.random.default_rng(0)
        sums = []
        for _ in range(400):
            sampled = PackedBatch.of(term.with_candidates(batch, SPECIAL, random=lambda purpose: random))
            sums.append(model.candidate_logits(hidden, sampled).exp().sum(dim=1))
    estimates = torch.stack(sums)
    error = estimates.std(dim=0) / len(sums) ** 0.5
    assert (estimates.std(dim=0) > 0).all()
    assert ((estimates.mean(dim=0) - exact).abs() < 5 * error + 1e-5 * exact).all()


def test_the_loss_over_candidates_is_torchs_and_trains_only_their_embeddings_at_the_head() -> None:
    phase = make_phase(candidates=48, label_weight=0.0)
    model, batch = make_model(), PackedBatch.of(make_batches(phase).batch(0))
    result = objective_of(phase).losses(model, batch)
    hidden = model.hidden(batch)
    logits = model.mlm_logits(hidden, batch.masked)[:, batch.candidates] + batch.stand_for.log()
    each = functional.cross_entropy(logits, torch.searchsorted(batch.candidates, batch.mlm_labels), reduction="none")
    external = batch.external[batch.sequence.flatten()[batch.masked]]
    expected = each[external].mean() + 2 * each[~external].mean()
    assert float(result.total.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    (bias,) = torch.autograd.grad(result.total, [model.mlm_head.decoder_bias])
    assert set(bias.nonzero().flatten().tolist()) == set(batch.candidates.tolist())


def test_shuffled_tokens_stay_in_their_text_and_labels_are_where_it_changed() -> None:
    shuffled = batches_of(phase_of("shuffled_tokens")).batch(0)
    plain = batches_of(make_phase(label_weight=0.0, terms=[{"kind": "distil"}, {"kind": "distil", "on": "task"}])).batch(0)
    assert np.array_equal(shuffled.sequence, plain.sequence)
    owner = plain.sequence.ravel()
    before, after = plain.token_ids.ravel(), shuffled.token_ids.ravel()
    for number in range(len(plain.first)):
        assert sorted(before[owner == number]) == sorted(after[owner == number])
    labels = np.zeros(len(before), dtype=np.int64)
    labels[shuffled.masked] = shuffled.mlm_labels
    assert np.array_equal(labels == 1, before != after)
    assert 0.1 < shuffled.mlm_labels.mean() <= 0.3 + 1 / 16
    assert len(shuffled.masked) == shuffled.tokens - 2 * len(shuffled.first)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"text": "causal"}, "set the share below 1"),
    ({"terms": [{"kind": "causal", "share": 0.5}], "task": 0}, "set share = 1"),
    ({"terms": [{"kind": "mlm"}, {"kind": "span_infilling"}], "task": 0}, "change the same tokens"),
    ({"terms": [{"kind": "mlm"}, {"kind": "mlm", "weight": 2.0}], "task": 0}, "two terms 'mlm' on external text"),
    ({"terms": [{"kind": "mlm"}]}, "no term is on it; add one, or set task = 0"),
    ({"terms": [{"kind": "mlm"}, {"kind": "classify"}], "task": 0}, "is on task text, of which none is sampled"),
    ({"terms": [{"kind": "important_tokens"}]}, "external text is sampled, but no term is on it"),
    ({"masking": {"kind": "scored"}}, "name the phase that scores"),
    ({"text": "span_infilling", "max_length": 8}, "32 or more"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_invalid_terms_name_the_remedy(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_phase(**changes)


def test_an_invalid_generator_names_the_remedy() -> None:
    task = TaskConfig(train="train.csv")
    with pytest.raises(ValueError, match=r"set head\.generator, like 64"):
        RunConfig(task=task, phases=(make_phase(external=0, text="replaced_tokens"),))
    with pytest.raises(ValueError, match=r"multiple of .* = 64"):
        RunConfig(task=task, head=HeadConfig(generator=100), phases=(make_phase(external=0),))
