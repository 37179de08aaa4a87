"""Policy and value losses; rewards, costs, returns and advantages of samples, turns and loss tokens [N]"""

from mmpack.errors import require

require("torch", "torch", __name__)
