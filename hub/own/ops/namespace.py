"""The namespace of this build's ops in torch: another build in the same process has another."""

from .._ops import add_op_namespace_prefix

NAMESPACE = add_op_namespace_prefix("").removesuffix("::") + "_python"
