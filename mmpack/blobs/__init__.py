"""Pixels by reference: each medium once, in shared memory or a folder, while samples carry its key (numpy)"""

from mmpack.blobs.folder import BlobFolder, BlobStats
from mmpack.blobs.shared import SharedBlobs
from mmpack.blobs.take import take

__all__ = ["BlobFolder", "BlobStats", "SharedBlobs", "take"]
