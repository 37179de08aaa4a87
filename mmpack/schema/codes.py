"""Every rule of the schema: code, what it says, how to fix a break.

MM0xx structure (a file that breaks one is not read), MM1xx media and spans, MM2xx loss,
MM3xx columns, MM4xx packing, MM5xx what failed in a run. Errors, docs and JSON schema read this table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

# what the check of a rule yields: code, field, message, [start, stop) of tokens
Found = Iterator[tuple[str, str, str, tuple[int, int] | None]]


@dataclass(frozen=True)
class Rule:
    code: str
    says: str
    fix: str


# code | what it says | how to fix a break; indented lines go on
_TABLE = """
MM001 | not a trace | pass a .jsonl, .jsonl.zst or .parquet file, as write_trace writes it
MM002 | the last record is truncated | write the file again; write_trace writes it whole or not at all
MM003 | wrong type or value out of range | write the type and range that sample.schema.json gives
MM004 | a required field is missing | write the field
MM005 | unknown schema version | read it with the version of mmpack that wrote it
MM006 | unknown family | use one of mmpack.families
MM007 | duplicate sample_id | give each sample of a trace its own id
MM008 | wrong length or shape | write one value per token, or one per loss token
MM009 | not a finite number | find the NaN or infinity where it is produced
MM010 | a record or file is too large, or nested too deep | split it, or raise max_record_bytes
MM011 | a medium that the family does not take, such as audio in a family without audio | name the family of the model
    that took it; put audio that is codec ids into codec_ids
MM012 | a field of schema version 2 in a sample of version 1 | set schema_version to '2', or leave the field out
MM013 | offsets that do not fit their lists | write n + 1 offsets that rise from 0 to the number of ids; Ragged.of
    makes them
MM101 | image tokens do not match the grid | expand each placeholder to one token per merged patch
MM102 | grid is empty or not a multiple of the merge size | record the grid that the processor returned
MM103 | modality spans out of range, unsorted or overlapping | sort the spans, without overlap
MM104 | placeholder outside any modality span | record its medium, or drop the token
MM105 | modality span covers other tokens | let spans cover only placeholders
MM106 | span names a medium that is missing or of another modality | set media_index to the medium's place in media
MM107 | medium without placeholders | drop the medium, or keep its placeholders
MM108 | num_tokens does not follow from the grid | set it to t·(h/m)·(w/m), where m is the merge size
MM109 | one cache key for two media | use the full key, over content, grid and settings
MM110 | media not in order of first appearance | order media by their first spans
MM111 | a medium's frames or rows do not fit the grid | record one span per temporal patch (or per merged row of an
    image), in order
MM112 | a video's rate or seconds below 0 | record the video's real times
MM113 | a video's frames and times differ in number | record one time per frame
MM114 | a video's frames or times go backwards | record frames in the order shown
MM115 | a frame beyond the video's total_frames | count the whole file's frames, not those of a cut or of the sampled
    list
MM116 | an audio's samples do not fit its feature frames | record the rate and number of the samples that the features
    were made of, and their hop
MM117 | the pieces of a video with its sound do not fit | number the pieces of each from 0, in order, and let them
    cover all its tokens
MM201 | loss spans out of range, unsorted or overlapping | sort the spans, without overlap
MM202 | loss span starts at token 0 | start at 1: a loss token needs a row before it
MM203 | loss over a placeholder | end the span before it; ban the id in the sampler
MM204 | loss over an observation | cut the observation out of the loss spans
MM205 | span out of range | count tokens of input_ids, unpadded and expanded
MM206 | observation spans unsorted or overlapping | sort the spans, without overlap
MM207 | an action outside the loss | let loss spans cover what the policy wrote; for an earlier sample's action, set
    its turn
MM208 | an action that does not fit its schema | write what action.schema.json requires
MM209 | an action outside the screen | name the coordinate system that the policy writes, or score it as malformed
MM210 | tokens that decode to another action than their span's | let find_actions make the spans, from the ids as
    sampled
MM211 | text that begins an action but is not one | score it; show the format in the prompt, with an example
MM212 | an action of another turn than its loss span | give both spans the same turn
MM213 | a loss token counted twice over a trajectory | keep a turn's loss in one sample; let it be context elsewhere,
    as to_samples does
MM214 | a trajectory in two groups | give each episode its own trajectory_id
MM301 | rollout_logprobs and loss tokens differ in number | pass one value per loss token
MM302 | log-probability above 0 | pass natural logs, not probabilities or losses
MM303 | policy_versions unsorted or overlapping | sort the spans, without overlap
MM304 | a score for a place that does not exist | correct the scope's turn, region or span
MM305 | a score on no loss token | drop the score or the sample: the score would fall on padding
MM306 | attention_mask has holes | mask only padding, at one end
MM307 | negative position | count positions from 0
MM308 | boxes or points without coordinate_system | name the system that they are in
MM309 | prefix_cached_tokens beyond the sample | count tokens of this sample
MM310 | a box with its corners swapped | write x0, y0, x1, y1, with x0 < x1 and y0 < y1
MM311 | a box or point outside its coordinate system | name the system that the numbers are in, or clip them
MM312 | an id beyond the vocabulary | use the tokenizer that made the ids, or drop the sample
MM313 | coordinates in the text that can't be read | write one of the forms of mmpack.grounding.find, complete, with
    finite numbers
MM314 | a box without area | let x0 < x1 and y0 < y1; record a place without area as a point
MM315 | a screen without size | record width and height in pixels, or leave it out
MM321 | a codec id outside its codebook | record the codec's own ids, without offsets
MM322 | codec ids are not one row per codebook | record ids [levels, frames] and the size of each level's codebook
MM323 | a frame rate that is not above 0 | record the codec's frames per second
MM331 | ragged lists and loss tokens differ in number | record one list per loss token, in the order of the loss spans
MM332 | an id in a list beyond the vocabulary | use the tokenizer of the policy: a teacher's ids must be the policy's
MM333 | a sampled token that its kept ids lack | record what top-k, top-p and min-p left in the step that sampled the
    token
MM334 | ids of a list that are not in ascending order | sort each list and drop repeats, as Ragged.of does
MM335 | a teacher's probabilities add up to more than 1 | record natural logs of the full softmax, not logits
MM336 | an expert twice among the routes of a token | record the ids of the experts, not their weights or ranks
MM401 | family can't be packed | train on padded batches (mp.pad); layout and parity still work
MM402 | shared rows whose token columns differ | pass equal columns, or don't share prefixes
MM403 | a column has the wrong length | pass one value per loss token, or one per token
MM404 | a medium's pixels are missing | pass media=, or samples from the processor
MM405 | one sample exceeds a budget | raise the budget, or drop the sample
MM406 | samples of two families in one pack | pack each family separately
MM407 | a sample with codec ids can't be planned or packed | compare it by parity, or set codec_ids to None to train
    its text alone; tests/rfc/README.md says what is missing
MM408 | samples of one pack differ in what is replayed | record it for all of them, pack them separately, or set it to
    None on all
MM409 | a sample is older than max_policy_lag | raise max_policy_lag, or leave such samples out
MM501 | a file is missing or can't be read | put it back, or leave its samples out
MM502 | a stored medium is damaged | store it again, from the processor
MM503 | no room for a medium's pixels | make room, or raise the store's max_bytes
MM504 | the sample's worker process ended | see the system's log; often memory ran out, or a file is broken
MM505 | a sample could not be made | see the error in its dead letter
"""
RULES = {
    rule.code: rule
    for rule in (
        Rule(*line.split(" | ")) for line in _TABLE.strip().replace("\n    ", " ").split("\n")
    )
}
# a tokenizer finds them broken: those who read tokens as text report them, `validate` does not
OF_TEXT = ("MM210", "MM211", "MM313")
