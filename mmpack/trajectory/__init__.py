"""Trajectories of agents: turns as the policy saw them, their samples, typed actions, records of others (numpy)

Public names are loaded when first used: `import mmpack.trajectory` loads neither torch nor transformers.
"""

from mmpack.exports import exports

__getattr__, __dir__, __all__ = exports(__name__)
