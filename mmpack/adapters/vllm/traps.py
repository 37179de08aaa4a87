"""What goes wrong between vLLM and a trainer without an error, and what this adapter does about each."""

TRAPS: dict[str, str] = {
    "position_rule": "After a video, text goes on at the last position + 1; in transformers at max(h, w) "
    "// merge past its start. Positions are recorded as the engine's model computes them, and parity compares them.",
    "second_per_grid_ts": "What a processor returns is cast to the engine's dtype, a video's seconds too: bfloat16 "
    "keeps three digits, and positions follow. They are recorded as cast; a trainer given the rollout's video takes "
    "them.",
    "double_expansion": "Expanded ids with multi_modal_data are expanded again. `from_samples` makes engine inputs "
    "that hold the placeholder ranges, which nothing expands.",
    "dropped_image": "`LLM.generate` takes an engine input (what render_cmpl made) for bare ids and drops its media "
    "without a word. `VllmEngine` gives engine inputs to `LLMEngine.add_request`.",
    "logprob_kind": "Logprobs are raw by default: before temperature, top-p and penalties. `sampling.logprobs` says "
    "which they are; raw ones are compared at temperature 1.",
    "sampled_placeholder": "A sampled placeholder id is a word to the engine and a picture to a processor. Spans come "
    "from the prompt's placeholder ranges, never from ids.",
    "stop_token": "The text of an output lacks the stop token, its ids have it. Samples hold the ids.",
    "retokenized_response": "The text of an output encodes to other ids. Samples hold the ids and a hash of the text.",
    "max_pixels": "mm_processor_kwargs of the engine change its grids, not the checkpoint's settings. Those of the "
    "engine's own processor are recorded.",
    "resize_backend": "The engine resizes with torchvision, a trainer perhaps with Pillow. `processor.image.backend` "
    "differs then, and samples carry the engine's own pixels.",
    "device_normalize": "By default an engine input holds bytes where a trainer reads normalised pixels. `to_samples` "
    "normalises them; engines made here leave it to the processor.",
    "cached_pixels": "The processor cache leaves pixels and grid of a picture that comes again out of the input. "
    "Inputs of engines made here keep them; `to_samples` finds those of others by their hash (`cached_media`), or "
    "refuses the input.",
    "cached_tokens_of_n": "A request with n > 1 reports one num_cached_tokens for all its responses. `rollout` sends "
    "one request a response.",
    "prefix_cache_after_update": "New weights leave old keys and values in the prefix cache. `load_weights` empties it "
    "and the caches of encoded media.",
    "stale_weights": "A tensor that a weight update left out keeps its old values. Checksums of what the engine "
    "multiplies by, under the trainer's names, tell which.",
    "dtype": "dtype='auto' takes the checkpoint's, at times bf16 beside an fp32 trainer. `metadata.engine.dtype` "
    "records it, and the drift report names it.",
    "seed_on_cpu": "On a CPU a SamplingParams.seed fails once a prompt is prefilled in chunks. `rollout` is seeded by "
    "torch's global generator.",
}
