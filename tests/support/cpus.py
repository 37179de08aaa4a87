"""Print settings under which this CPU computes as others do, one run per line. `make test-cpus` runs tests under each.

A CPU with wide vectors can do without them; one that lacks them stops at the first, so that only its own are named.
`make test` runs with all that the CPU has and with one thread; here the last run has two.
"""

import torch

NARROWER = {
    "avx2": "ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2",
    "default": "ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2",
}

own = torch.backends.cpu.get_cpu_capability().lower()
below = {"avx512": ["avx2", "default"], "avx2": ["default"]}.get(own, [])
runs = [NARROWER[name] for name in below] or [""]
for i, settings in enumerate(runs, 1):
    # Threads of several workers on as many cores: those that wait must not spin.
    threads = "OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive" if i == len(runs) else "OMP_NUM_THREADS=1"
    print(f"{settings} {threads}".strip())
