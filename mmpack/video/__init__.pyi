# The public names: what type checkers see, and `mmpack.exports` loads.
from mmpack.video.cache import FrameCache as FrameCache
from mmpack.video.choose_frames import sample as sample
from mmpack.video.decoding import decode as decode
from mmpack.video.drop import drop_frames as drop_frames
from mmpack.video.drop import mask_frames as mask_frames
from mmpack.video.frame_plan import FramePlan as FramePlan
from mmpack.video.info import probe as probe
from mmpack.video.limits import Limits as Limits
from mmpack.video.patches import plan_patches as plan_patches
from mmpack.video.pixel_settings import normalization as normalization
