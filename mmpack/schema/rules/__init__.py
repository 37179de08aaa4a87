"""The rules of samples: `codes.RULES` describes them; each file checks its own, one sample at a time."""

from mmpack.schema.codes import RULES, Rule
from mmpack.schema.rules.problems import (
    Problem,
    check,
    packing_problems,
    problems_of,
    rule_problems,
    structured,
    validate,
)
from mmpack.schema.rules.trajectories import Trajectories

__all__ = [
    "RULES",
    "Problem",
    "Rule",
    "Trajectories",
    "check",
    "packing_problems",
    "problems_of",
    "rule_problems",
    "structured",
    "validate",
]
