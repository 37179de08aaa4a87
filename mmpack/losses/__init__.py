"""Policy and value losses; rewards, costs, returns and advantages of samples, turns and loss tokens [N]"""

from mmpack.errors import require
from mmpack.exports import exports

require("torch", "torch", __name__)

__getattr__, __dir__, __all__ = exports(__name__)
