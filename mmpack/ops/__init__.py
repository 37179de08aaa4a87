"""Operators on packed rows [T] and loss tokens [N], one folder per op; which backend runs each."""

from mmpack.errors import require

require("torch", "torch", __name__)
