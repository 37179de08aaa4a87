"""The reward that grpo.yaml names. verl calls it once per response."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **more):  # yours
    """1 for the right letter, else 0."""
    return float(solution_str.strip()[:1] == ground_truth)
