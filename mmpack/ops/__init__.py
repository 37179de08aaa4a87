"""Operators on [T] packed rows and [N] loss tokens; one public function a file."""

from mmpack.errors import require

require("torch", "torch", __name__)
