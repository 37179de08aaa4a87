"""Names that all producers of samples share: `<group>/<k>` of samples, and the sampler's settings."""

from __future__ import annotations

from collections.abc import Sequence

# settings of a sampler that decide what logprobs mean: keys of `Sample.sampling`, other than `logprobs`
SAMPLING_NAMES = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)


def numbered_in_groups(group_ids: Sequence[str]) -> list[str]:
    """One sample id per entry: `<group>/<k>`, where k counts the samples of each group from 0.

    Example:
        >>> from mmpack.layout.names import numbered_in_groups
        >>> numbered_in_groups(["a", "b", "a"])
        ['a/0', 'b/0', 'a/1']
    """
    count: dict[str, int] = {}
    out = []
    for group in group_ids:
        k = count[group] = count.get(group, -1) + 1
        out.append(f"{group}/{k}")
    return out
