"""What the probe allows: the rounding of each side, measured at every module and token, times a factor."""

from __future__ import annotations

from dataclasses import dataclass

from mmpack.errors import check_flag, check_number, check_whole
from mmpack.probe.digest import FLOOR


@dataclass(frozen=True)
class Contract:
    """A row parts at a module if its error is above `factor` × its noise + `floor`.

    The noise of a row at a module is measured, not assumed: each side runs again with every module's output rounded
    another way (`Recorder.shaken`), and what that moves there is what rounding explains there: it grows with depth as
    the model lets it grow, and is that of each side's own dtype. Both sides' noises are added in quadrature, and a row
    has at least the median noise of its module's rows. `floor`: relative, always allowed.

    Where what a module read agrees better than that, so must what it makes of it: an output may be off by `factor` ×
    (the module's own rounding + `gain` × what the noise grows by in the module × the error of its input). So a module
    whose input is equal bit by bit is held to its own rounding, however deep it lies.

    What makes all rows of a module a little longer, or all a little shorter, is found below the noise of a single row
    (an epsilon, a scale): rounding has no sign, so it averages out of the mean growth of the rows' norms. That mean may
    be `factor` × its noise / √(rows, 64 at most) + `pooled_floor`, and `gain` × what the module's input grew by. Stages
    between modules are not held to it, since kernels of attention may round exponentials with a sign; nor are sides of
    unlike dtypes, whose rounded weights have one. `pooled`: False leaves it out.
    """

    factor: float = 6.0
    floor: float = FLOOR
    gain: float = 4.0
    passes: int = 1  # noisy ones, of each side
    pooled: bool = True
    pooled_floor: float = 1e-7

    def __post_init__(self) -> None:
        check_number("probe.Contract", "factor", self.factor, above=0)
        check_number("probe.Contract", "gain", self.gain, above=0)
        check_number("probe.Contract", "floor", self.floor, least=0)
        check_flag("probe.Contract", "pooled", self.pooled)
        check_number("probe.Contract", "pooled_floor", self.pooled_floor, least=0)
        check_whole("probe.Contract", "passes", self.passes, least=0)
