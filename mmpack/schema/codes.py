"""Every rule of the schema: code, what it says, how to fix a break.

MM0xx structure (a file that breaks one is not read), MM1xx media and spans, MM2xx loss,
MM3xx columns, MM4xx packing. Errors, docs and JSON schema read this table.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    code: str
    says: str
    fix: str


RULES: dict[str, Rule] = {
    r.code: r
    for r in (
        Rule(
            "MM001", "not a trace", "pass a .jsonl, .jsonl.zst or .parquet file made by write_trace"
        ),
        Rule("MM002", "the last record is truncated", "write it again; write_trace is atomic"),
        Rule("MM003", "wrong type or value out of range", "write what sample.schema.json says"),
        Rule("MM004", "a required field is missing", "write the field"),
        Rule("MM005", "unknown schema version", "read it with the mmpack that wrote it"),
        Rule("MM006", "unknown family", "use a family of mmpack.families"),
        Rule("MM007", "duplicate sample_id", "give each sample of a trace its own id"),
        Rule("MM008", "wrong length or shape", "write one value per token, or one per loss token"),
        Rule("MM009", "not a finite number", "find the NaN or infinity where it is produced"),
        Rule(
            "MM010",
            "a record or file is too large, or nested too deep",
            "split it, or raise max_record_bytes",
        ),
        Rule(
            "MM101", "image tokens do not match the grid", "expand one placeholder per merged patch"
        ),
        Rule(
            "MM102", "grid is empty or not a multiple of the merge size", "use the processor's grid"
        ),
        Rule("MM103", "modality spans out of range, unsorted or overlapping", "sort and cut them"),
        Rule(
            "MM104", "placeholder outside any modality span", "give its medium, or drop the token"
        ),
        Rule("MM105", "modality span covers other tokens", "let spans cover only placeholders"),
        Rule(
            "MM106", "span names a medium that is missing or of another modality", "fix media_index"
        ),
        Rule("MM107", "medium without placeholders", "drop the medium, or keep its placeholders"),
        Rule("MM108", "num_tokens does not follow from the grid", "use t·(h/m)·(w/m)"),
        Rule(
            "MM109", "one cache key for two media", "use the full key over content, grid, settings"
        ),
        Rule("MM110", "media not in order of first appearance", "order media by their first span"),
        Rule(
            "MM111",
            "video frames do not fit the grid",
            "one frame span per temporal patch, in order",
        ),
        Rule("MM112", "a video's rate or seconds below 0", "record the video's real times"),
        Rule("MM113", "a video's frames and times differ in number", "record one time per frame"),
        Rule("MM114", "a video's frames or times go back", "record frames in the order shown"),
        Rule(
            "MM115",
            "a frame beyond the video's total_frames",
            "count the whole file's frames, not those of a cut or of the sampled list",
        ),
        Rule("MM201", "loss spans out of range, unsorted or overlapping", "sort and cut them"),
        Rule(
            "MM202", "loss span starts at token 0", "start at 1: a loss token needs a row before it"
        ),
        Rule(
            "MM203", "loss over a placeholder", "end the span before it; ban the id in the sampler"
        ),
        Rule("MM204", "loss over an observation", "cut the observation out of the loss spans"),
        Rule("MM205", "span out of range", "count tokens of input_ids, unpadded and expanded"),
        Rule("MM206", "observation spans unsorted or overlapping", "sort and cut them"),
        Rule(
            "MM301", "rollout_logprobs and loss tokens differ in number", "one value per loss token"
        ),
        Rule("MM302", "log-probability above 0", "pass natural logs, not probabilities or losses"),
        Rule("MM303", "policy_versions unsorted or overlapping", "sort and cut them"),
        Rule(
            "MM304", "score of a place that does not exist", "fix the scope's turn, region or span"
        ),
        Rule(
            "MM305", "score on no loss token", "drop the score or the sample: it would hit padding"
        ),
        Rule("MM306", "attention_mask has holes", "mask only padding, at one end"),
        Rule("MM307", "negative position", "count positions from 0"),
        Rule("MM308", "boxes or points without coordinate_system", "say which system they are in"),
        Rule("MM309", "prefix_cached_tokens beyond the sample", "count tokens of this sample"),
        Rule("MM310", "a box with its corners swapped", "write x0, y0, x1, y1"),
        Rule(
            "MM311",
            "a box or point outside its coordinate system",
            "name the system that the numbers are in, or clip them",
        ),
        Rule(
            "MM312",
            "an id beyond the vocabulary",
            "use the tokenizer that made the ids, or drop the sample",
        ),
        Rule(
            "MM313",
            "coordinates in the text that can't be read",
            "write one of the forms of mmpack.grounding.FORMS, whole, with finite numbers",
        ),
        Rule(
            "MM314",
            "a box without area",
            "let x0 < x1 and y0 < y1; a place without area is a point",
        ),
        Rule(
            "MM315", "a screen without size", "record width and height in pixels, or leave it out"
        ),
        Rule("MM401", "family can't be packed", "train it unpacked; layout and parity still work"),
        Rule(
            "MM402", "shared rows with unlike token columns", "pass equal columns, or don't share"
        ),
        Rule(
            "MM403", "a column has the wrong length", "one value per loss token, or one per token"
        ),
        Rule(
            "MM404", "a medium's pixels are missing", "pass media=, or samples from the processor"
        ),
        Rule("MM405", "one sample exceeds a budget", "raise the budget, or drop the sample"),
        Rule("MM406", "samples of two families in one pack", "pack each family separately"),
    )
}
