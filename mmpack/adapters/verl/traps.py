"""What goes wrong in verl, by the cause that parity names, and how this adapter shows or avoids it."""

TRAPS: dict[str, str] = {
    "sampled_placeholder": "A placeholder in a response makes verl's model count features + 1 (verl#3469, verl#7038): "
    "here it stays a word that the policy wrote, and `mp.validate` names it (MM203).",
    "second_per_grid_ts": "verl never passes second_per_grid_ts to get_rope_index, so that a video counts one second a "
    "temporal patch: the sample records the seconds beside the positions, and parity names the difference.",
    "max_pixels": "verl runs the processor again on the trainer's side, and its pixel bounds may not be the engine's "
    "(verl#4050): `to_samples` records the processor's settings and each grid.",
    "not_expanded": "Prompts of one id a picture against expanded ones (verl#4412, EasyR1): run and grid of the sample "
    "contradict each other (MM101).",
    "padding_positions": "position_ids that count padding (verl#5024): `to_samples` takes the positions of the tokens "
    "that attention_mask keeps, so that an offset shows.",
    "dropped_image": "One bad sample drops pictures of the batch, whose grids then belong to other rows (verl#6921): "
    "`to_samples` refuses a row whose grids and placeholders differ in number.",
    "empty_response": "The reward of a response without tokens lands on the last padded column: `to_samples` refuses "
    "the row, from `rm_scores` or `token_level_scores`.",
    "logprob_kind": "rollout_log_probs are of the engine's temperature, old_log_probs of the actor's: pass `sampling`, "
    "so that parity compares what they mean.",
    "truncated_medium": "Prompts cut from the left or right go through pictures: the last run is shorter than its grid "
    "(MM101).",
}
