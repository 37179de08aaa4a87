"""Runs whenever Python starts in an environment that pins PyPI's torchvision, and lets it be imported there.

PyPI's torchvision is built for CUDA: beside a CPU build of torch its operators don't load, and its import fails where
it registers the shapes of two of them. These are declared here, just before that import. None of them is ever called:
images are resized by torch's own operators.
"""

import importlib.abc
import sys


class DeclareOperators(importlib.abc.MetaPathFinder):
    """Finds nothing. The first time anybody looks for torchvision, it declares the operators and steps aside."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            # kept alive: a library's definitions end with it
            self.library = sys.torchvision_operators = torch.library.Library(
                "torchvision", "FRAGMENT"
            )
            self.library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            self.library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


sys.meta_path.insert(0, DeclareOperators())
