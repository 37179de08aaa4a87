"""The causes that parity can name, in the order in which a pipeline runs into them, and what to do about each.

A cause that stands earlier here is the root of those after it: `first` of a report follows this order.
"""

from __future__ import annotations

from typing import Literal

UNKNOWN = "unknown"

FIXES: dict[str, str] = {
    "sample_order": "Carry each sample's id with it: never pair two lists by their order.",
    "merged_turns": "Make samples of turns in one way on both sides: to_samples(merge=True), or merge=False.",
    "model_family": "Use the processor of one checkpoint on both sides: one family, patch and merge size.",
    "exif_rotation": "Apply EXIF rotation on both sides, or hand the rotated pixels to both.",
    "alpha": "Flatten transparent pictures once, on one background, and hand RGB to both sides.",
    "jpeg_reencode": "Send the engine the original file, not one that was encoded again.",
    "cache_key": "Build the cache key over content, grid and settings, and never shorten it.",
    "video_rotation": "Turn frames by the container's rotation on both sides: decode both by one decoder.",
    "fps_missing": "Pass the video's real fps to the side that assumed 24.",
    "video_reader": "Read files by one library: video_settings={'reader': …} on both sides, or hand over (file, plan).",
    "video_metadata": "Probe the file once (mmpack.video.probe), and hand its fps and frame count to both.",
    "frame_sampling": "Make one plan for both sides: wrap_processor(video_policy=…) makes and records it.",
    "frame_pixels": "Decode once (mmpack.video.decode), and hand the same frames to both sides.",
    "resize_twice": "Resize once: hand both sides the picture that the other was handed.",
    "max_pixels": "Set the same min_pixels and max_pixels on both sides.",
    "view_settings": "Cut pictures by one rule: the same max_slice_nums and scale_resolution on both sides.",
    "video_budget": "Limit a video's pixels by one rule: per frame, or of the whole video.",
    "audio_sampling_rate": "Resample once, to the model's rate: mp.audio.decode(file, sampling_rate=…) for both sides.",
    "audio_hop": "Use one feature extractor on both sides: one hop_length, n_fft and number of mel bins.",
    "audio_padding": "Extract each audio by itself, padded by one rule, or hand the features on.",
    "codec_flip": "Encode audio once and hand the ids on, or encode in one batch shape on both sides.",
    "media_order": "Hand media over in the order of their placeholders, each sample its own.",
    "dropped_image": "Keep each sample with its own media: drop the whole sample or nothing.",
    "double_expansion": "Pass expanded ids with expanded=True, or hand the processor raw text.",
    "not_expanded": "Expand each placeholder to one id per merged patch before training.",
    "timestamp_rounding": "Write one time per temporal patch, the middle of its frames, or pass the expanded ids on.",
    "video_markers": "Expand by one transformers on both sides (5.10 changed it), or pass the expanded ids on.",
    "padding_in_ids": "Hand over ids without padding, or with the attention_mask that marks it.",
    "bos": "Render and tokenize on one side only, or with one add_special_tokens on both: BOS once, or never.",
    "audio_in_video": "Set the same use_audio_in_video on both sides, or pass the expanded ids on.",
    "truncated": "Drop samples that are too long, on both sides, or raise the limit: never cut their ids.",
    "truncated_medium": "Truncate between media, or drop the sample; never cut through a medium.",
    "turn_order": "Keep the turns of a conversation in the order in which they were sampled.",
    "chat_template": "Use one chat template, system prompt and tool text, or pass the ids on.",
    "sampled_placeholder": "Ban the placeholder ids in the sampler, or drop such responses.",
    "retokenized_response": "Train on the ids that the engine returned; never encode the text again.",
    "rewritten_response": "Train on the ids that the engine returned, never on a response rendered again.",
    "stop_token": "Keep the sampled stop token on both sides, or strip it on both.",
    "position_rule": "Use one position rule on both sides (grid: transformers 5.19 and later).",
    "second_per_grid_ts": "Pass one second_per_grid_ts, and one tokens_per_second, to both sides.",
    "padding_positions": "Compute position_ids from the attention mask, so that padding adds none.",
    "loss_mask_shift": "Take loss_spans from the engine's turns: each turn's ids, its end included.",
    "turn_without_loss": "Give each turn's response to the loss on both sides, or to neither.",
    "empty_response": "Drop samples without a response token before rewards are scattered.",
    "coordinate_system": "Convert targets once, to what the family writes (mmpack.grounding.to_system), for both.",
    "logprob_kind": "Record logprobs of one kind: both raw, or both under the same sampling settings.",
    "sampling": "Score under the sampler's settings, and record each on both sides: absent does not mean off.",
    "truncated_support": "Hand the engine's kept_ids on and score over them (support=), or sample without filters.",
    "routing": "Hand the engine's routed_experts on, and replay them in the trainer's forward; or record none.",
    UNKNOWN: "Compare what each side was handed; record processor settings and content hashes on both.",
}
RANK = {cause: rank for rank, cause in enumerate(FIXES)}

# causes that the smoke test can put into a train side on purpose
Injected = Literal[
    "max_pixels",
    "double_expansion",
    "sampled_placeholder",
    "retokenized_response",
    "padding_positions",
    "loss_mask_shift",
    "dropped_image",
    "chat_template",
]
