"""What numpy does: ids, spans and pixels as transformers' processor makes them, positions as its model counts them."""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from conformance.agree import expect, same
from conformance.subject import Subject, user

from mmpack.adapters.transformers import model_inputs
from mmpack.layout.mrope import sample_positions
from mmpack.layout.occurrences import occurring_media
from mmpack.packing.pad import pad
from mmpack.parity.compare import compare
from mmpack.processors.views import pictures
from mmpack.schema.rules import validate
from mmpack.schema.sample import Sample

RESPONSE = [11, 12, 13]
TYPES = {"image": 1, "video": 2, "audio": 3}


def layout(subject: Subject) -> None:
    """Two pictures, one of them twice: ids and pixels are the processor's, and every way in gives one sample."""
    one, two = subject.pictures
    shown = [one, two, one]
    messages = user(one, "and", two, "beside", one, "?")
    hf, wrapped = subject.processor, subject.wrapped
    sample = wrapped(messages, response_ids=RESPONSE, sample_id="s")
    text = hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    wanted = hf(text=[text], images=shown, return_tensors="pt")
    prompt = wanted["input_ids"][0].numpy()
    same(sample.input_ids, np.concatenate([prompt, RESPONSE]), "input_ids")
    expect(validate([sample]) == [], f"a rule is broken: {validate([sample])}")
    distinct = len(pictures(sample.media))
    expect(distinct == 2, f"{distinct} pictures, expected 2: one comes twice")
    held = np.zeros(len(sample), dtype=bool)
    for span in sample.modality_spans:
        held[span.start : span.stop] = True
    ids = list(subject.family.placeholder_ids.values())
    same(held, np.isin(sample.input_ids, ids), "modality_spans over placeholders")
    same(sample.loss_indices, np.arange(len(prompt), len(sample)), "loss_spans")
    inputs = model_inputs(pad([sample]), subject.model)
    for name in inputs.keys() & wanted.keys() - {"input_ids", "attention_mask"}:
        expected = wanted[name]
        if subject.family.pixel_layout == "padded" and expected.ndim == 3:
            # a processor pads pictures to its budget, a batch to its longest
            longest = max(m.num_patches for m in sample.media)
            filler = expected[:, longest:]
            expect(
                bool((filler == (0 if filler.is_floating_point() else -1)).all()),
                f"{name}: the processor's lines go on behind the longest picture's {longest} patches",
            )
            expected = expected[:, :longest]
        if name.endswith("token_type_ids"):  # of the prompt
            same(inputs[name][:, : len(prompt)], expected, name)
        else:
            same(inputs[name], expected, name)
    expect("pixel_values" in inputs.keys() & wanted.keys(), "the forward is given no pixel_values")
    _every_way(subject, sample, text, shown)


def _every_way(subject: Subject, sample: Sample, text: str, shown: list[Any]) -> None:
    """Expanded ids, and ids with one placeholder per medium."""
    spans = [(s.start, s.stop) for s in sample.loss_spans]
    wrapped = subject.wrapped
    again = wrapped.from_ids(sample.input_ids, shown, loss_spans=spans, sample_id="s")
    raw = subject.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    short = wrapped.from_ids([*raw, *RESPONSE], shown, expanded=False, loss_spans=(), sample_id="s")
    for other, way in ((again, "expanded=True"), (short, "expanded=False")):
        same(other.input_ids, sample.input_ids, f"from_ids({way}): input_ids")
        same(other.position_ids, sample.position_ids, f"from_ids({way}): position_ids")
        keys = [m.cache_key for m in other.media]
        expect(keys == [m.cache_key for m in sample.media], f"from_ids({way}): other media")
        expect(
            other.modality_spans == sample.modality_spans, f"from_ids({way}): other modality_spans"
        )


def positions(subject: Subject) -> None:
    """Of each sample, what reaches the text model's rotary embedding where the forward is given no positions."""
    model, samples = subject.model, subject.samples
    for sample in samples:
        found, _ = sample_positions(sample)
        wanted = _counted(model, sample)
        if len(found) == 1:  # a text model of more rows is given equal ones
            same(wanted, wanted[:1].expand_as(wanted), f"rows of positions, {sample.sample_id}")
            wanted = wanted[:1]
        same(found, wanted, f"positions of sample {sample.sample_id}")
        given = model_inputs(pad([sample]), model)["position_ids"].reshape(-1, len(sample))
        same(given[-len(wanted) :], wanted, f"position_ids of the forward, {sample.sample_id}")


def _counted(model: Any, sample: Sample) -> torch.Tensor:
    """int64 [rows, L], by transformers: its `get_rope_index`, or the count of its text model."""
    inputs = model_inputs(pad([sample]), model)
    del inputs["position_ids"]
    inputs = other_inputs(inputs, model, sample)
    seen: list[torch.Tensor] = []

    def see(module: Any, args: Any, kwargs: Any) -> None:
        seen.append(kwargs["position_ids"] if "position_ids" in kwargs else args[1])

    decoder = model.model.get_decoder()
    rotary = [m for n, m in decoder.named_modules() if n.rpartition(".")[2].startswith("rotary")]
    hooks = [m.register_forward_pre_hook(see, with_kwargs=True) for m in rotary]
    try:
        with torch.no_grad():
            model.model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    expect(bool(seen), "no rotary embedding of the text model was called")
    return seen[0].reshape(-1, len(sample))


def other_inputs(inputs: dict[str, Any], model: Any, sample: Sample) -> dict[str, Any]:
    """What transformers' processor hands the forward beside pixels: kinds of tokens, and a clip's seconds."""
    takes = inspect.signature(model.model.forward).parameters
    if "mm_token_type_ids" in takes and "mm_token_type_ids" not in inputs:
        kinds = torch.zeros(1, len(sample), dtype=torch.long)
        for span in sample.modality_spans:
            # a clip may be handed over as images, frame by frame
            given = f"{span.modality}_grid_thw" in inputs
            kinds[0, span.start : span.stop] = TYPES[span.modality if given else "image"]
        inputs = inputs | {"mm_token_type_ids": kinds}
    seconds = [
        m.second_per_grid_ts for m in occurring_media(sample) if m.second_per_grid_ts is not None
    ]
    if "second_per_grid_ts" in takes and seconds:
        inputs = inputs | {"second_per_grid_ts": torch.tensor(seconds)}
    return inputs | _heard_inputs(takes, sample, seconds)


def _heard_inputs(takes: Any, sample: Sample, seconds: list[float]) -> dict[str, Any]:
    """What a forward counts positions of audio by; features are among the embeddings already."""
    out: dict[str, Any] = {}
    if "video_second_per_grid" in takes and seconds:
        out["video_second_per_grid"] = torch.tensor(seconds)
    if "use_audio_in_video" in takes:
        out["use_audio_in_video"] = any(s.chunk is not None for s in sample.modality_spans)
    frames = [m.grid_thw[0] for m in occurring_media(sample) if m.modality == "audio"]
    if "feature_attention_mask" in takes and frames:
        held = torch.arange(max(frames)) < torch.tensor(frames)[:, None]
        out["feature_attention_mask"] = held.int()
    return out


def parity(subject: Subject) -> None:
    """Equal sides are ok; a run of placeholders that one side has otherwise is named, both ways."""
    samples = subject.samples
    other = [copy.copy(s) for s in samples]
    report = compare(samples, other)
    expect(report.ok and report.compared == len(samples), report.summary())
    for cause in ("not_expanded", "double_expansion"):
        changed = [_with_runs(s, cause) for s in samples]
        for left, right, way in ((samples, changed, "train"), (changed, samples, "rollout")):
            report = compare(left, right)
            where = f"{cause} on the {way} side"
            expect(not report.ok, f"{where}: parity is ok")
            first = report.first
            expect(first is not None and first.cause == cause, f"{where}: found {first}")
            assert first is not None
            of = {s.sample_id: s for s in left}[first.sample_id]
            runs = [(span.start, span.stop) for span in of.modality_spans]
            expect(first.span in runs, f"{where}: found at {first.span}, the runs are {runs}")


def _with_runs(sample: Sample, cause: str) -> Sample:
    """The sample with one id per run, or with each id of a run expanded again, to as many as the run has."""
    ids: list[int] = []
    spans, at = [], 0
    moved = np.zeros(len(sample) + 1, dtype=np.int64)
    for span in sample.modality_spans:
        count = span.stop - span.start
        new = 1 if cause == "not_expanded" else count**2
        moved[span.stop :] += new - count
        ids += [*sample.input_ids[at : span.start], *[sample.input_ids[span.start]] * new]
        at = span.stop
    ids += [*sample.input_ids[at:]]
    for span in sample.modality_spans:
        shift = moved[span.start]
        spans.append(
            replace(span, start=int(span.start + shift), stop=int(span.stop + moved[span.stop]))
        )
    loss = [
        replace(s, start=int(s.start + moved[s.start]), stop=int(s.stop + moved[s.stop]))
        for s in sample.loss_spans
    ]
    out = copy.copy(sample)
    out.input_ids, out.modality_spans, out.loss_spans = np.array(ids, dtype=np.int64), spans, loss
    return out
