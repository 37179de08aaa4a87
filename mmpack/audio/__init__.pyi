# The public names: what type checkers see, and `mmpack.exports` loads.
from mmpack.audio.decoding import Limits as Limits
from mmpack.audio.decoding import decode as decode
