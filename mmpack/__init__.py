"""mmpack: the data layer of multimodal RL.

Public names are loaded when first used: `import mmpack` loads neither torch nor transformers.
"""

import importlib
import logging

from mmpack import notebook as _notebook
from mmpack.exports import exports

__getattr__, __dir__, __all__ = exports(__name__)

_notebook.load_with(lambda: importlib.import_module("mmpack.view"))
logging.getLogger("mmpack").addHandler(
    logging.NullHandler()
)  # the application decides what is logged
