# The public names: what type checkers see, and `mmpack.exports` loads.
from mmpack.invariant.mode import batch_invariant as batch_invariant
from mmpack.invariant.parallel import column_parallel as column_parallel
from mmpack.invariant.parallel import row_parallel as row_parallel
from mmpack.invariant.parallel import tree_all_reduce as tree_all_reduce
