"""Pixels by reference: each medium stored once, in shared memory or a folder; samples carry only its key (numpy)"""

from mmpack.blobs.folder import BlobFolder
from mmpack.blobs.shared import SharedBlobs
from mmpack.blobs.take import take

__all__ = ["BlobFolder", "SharedBlobs", "take"]
