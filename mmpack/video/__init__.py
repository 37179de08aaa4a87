"""Which frames of a video are taken (plans, by policy), reading and decoding files, patch order.

Public names are loaded when first used: `import mmpack.video` loads neither torch nor av.
"""

from mmpack.exports import exports

_HOME = {
    "mmpack.video.limits": ("Limits",),
    "mmpack.video.info": ("probe",),
    "mmpack.video.decoding": ("decode",),
    "mmpack.video.cache": ("FrameCache",),
    "mmpack.video.frame_plan": ("FramePlan",),
    "mmpack.video.choose_frames": ("sample",),
    "mmpack.video.patches": ("plan_patches",),
    "mmpack.video.pixel_settings": ("normalization",),
    "mmpack.video.drop": ("drop_frames", "mask_frames"),
}
__getattr__, __dir__, __all__ = exports(__name__, _HOME)
