"""Segments on a GPU: compiled, they are what they are without."""

import pytest
import torch

from mmpack.ops.segments import entry_segments, segment_ids

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_compiled(dtype):
    lengths = torch.randint(0, 9, (900,), generator=torch.Generator().manual_seed(0))
    cu = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to("cuda", dtype)
    count = int(lengths.sum())
    wanted = torch.repeat_interleave(lengths).cuda()
    for run in (segment_ids, entry_segments):
        for call in (run, torch.compile(run, fullgraph=True)):
            assert torch.equal(call(cu, count), wanted)
