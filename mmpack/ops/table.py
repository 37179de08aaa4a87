"""The ops of this room, as `mmpack doctor` lists them; attention and the delta rule report by themselves."""

from mmpack.ops.backend import ops_of

OPS = ops_of("mmpack.ops")
