"""What goes wrong in TRL, by the id of the cause (`mmpack.parity.fixes`), and how it shows here."""

TRAPS: dict[str, str] = {
    "double_expansion": (
        "GRPOTrainer hands vLLM ids that are expanded already, and vLLM expands them again (trl#6294): "
        "MmpackGRPO compares the ids that the engine ran with those that are trained on, and stops at the first "
        "that differs."
    ),
    "max_pixels": (
        "vLLM resizes pictures by its own processor's limits, GRPOTrainer by those of processing_class (trl#6401): "
        "the same comparison stops the run; `to_samples` records the trainer's settings, for parity."
    ),
    "chat_template": (
        "GRPOTrainer renders each prompt twice, for generation and again for pixels and mm_token_type_ids, and the "
        "second time without its chat_template (trl#5785): MmpackGRPO trains on the generated ids alone and derives "
        "positions from them; `to_samples` refuses mm_token_type_ids that contradict the ids."
    ),
    "dropped_image": (
        "Where one completion was cut inside a tool's picture, GRPOTrainer drops the pixels of the whole batch and "
        "trains the placeholders as words: here placeholders without a picture are an error that names the row."
    ),
    "sampled_placeholder": (
        "generate is told to suppress image_token_id, vLLM is not, and neither is told of the video's: a sampled "
        "placeholder is an error that names the row, before the model runs."
    ),
    "logprob_kind": (
        "A vLLM server started without --logprobs-mode processed_logprobs returns raw logprobs, and every importance "
        "ratio is off by the temperature (trl#4159); with top_p, top_k or min_p they are of another support than the "
        "trainer's: `to_samples(…, sampling=…)` records which they are, and parity refuses to compare unlike kinds."
    ),
}
