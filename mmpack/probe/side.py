"""Sides, and `run`: the same samples through two of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmpack.errors import ArgumentError, check_whole, kind_of
from mmpack.probe.compare import compare
from mmpack.probe.digest import DIRECTIONS
from mmpack.probe.places import places_of
from mmpack.probe.record import MEMORY, Record, Recorder
from mmpack.probe.report import Contract, ProbeReport
from mmpack.progress import tracked
from mmpack.schema.sample import Sample, as_samples

Run = Callable[[Sequence[Sample], Recorder], None]


@dataclass
class Side:
    """A way to run samples. `run(samples, recorder)` puts rows [R, …] into the recorder; adapters make it.

    It is called once for the values, then again for each noisy pass, in which it applies `recorder.shaken` to what
    each module computed; it may run the samples in several parts. `about`: what the report says of the side; of sides
    whose `dtype` in it is one and the same, the mean growth of rows is compared too (`Contract.pooled`).
    Raises: ArgumentError for a name that is no str, or a run that can't be called.
    """

    name: str
    run: Run
    about: dict[str, Any] = field(
        default_factory=dict
    )  # what the report says of it: dtype, layout, versions

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not callable(self.run):
            raise ArgumentError(
                f"probe.Side: name is {kind_of(self.name)} and run {kind_of(self.run)}. "
                "Fix: pass Side(name, run), where run takes samples and a recorder"
            )


def record(
    side: Side,
    samples: Sequence[Sample],
    *,
    tokens: Any = "all",
    passes: int = 1,
    memory: int = MEMORY,
    directions: int = DIRECTIONS,
    seed: int = 0,
) -> Record:
    """Run samples through one side and keep its digests; arguments and errors are those of `run`.

    `passes`: how many more passes to take with noise.
    """
    if not isinstance(side, Side):
        raise ArgumentError(
            f"probe: a side is {kind_of(side)}. Fix: pass a probe.Side, such as probe_side(model), or a record"
        )
    check_whole("probe", "passes", passes, least=0)
    check_whole("probe", "seed", seed, least=0)
    samples = [samples] if isinstance(samples, Sample) else as_samples(samples, "probe")
    recorder = Recorder(
        side.name,
        places_of(samples, tokens),
        memory=memory,
        directions=directions,
        seed=seed,
    )
    recorder.record.about.update(side.about)
    for done in tracked(range(1 + passes), f"running {side.name}"):
        if done:
            recorder.again()
        side.run(samples, recorder)
    recorder.record.about["spilled_bytes"] = recorder.store.spilled
    return recorder.done()


def run(
    a: Side | Record,
    b: Side | Record,
    samples: Sequence[Sample] = (),
    *,
    tokens: Any = "all",
    contract: Contract | None = None,
    memory: int = MEMORY,
    seed: int = 0,
) -> ProbeReport:
    """Find the first module and token where two sides part beyond what rounding explains.

    Args:
        a, b: sides; or records of the same samples, as `record` makes and `read_record` reads them.
        samples: what both run; their media hold pixels. Of two records none.
        tokens: "all"; "loss", the rows that predict loss tokens; indices for every sample; or {sample_id: indices}.
            A tower's rows are recorded all.
        contract: what is allowed; see `Contract`.
        memory: bytes of digests per side that are held in memory; what is more lies in a temporary file.
        seed: of the digests' directions.

    Raises: ArgumentError; what the sides raise.
    """
    contract = Contract() if contract is None else contract
    if not isinstance(contract, Contract):
        raise ArgumentError(
            f"probe.run: contract is {kind_of(contract)}. Fix: pass probe.Contract(…)"
        )
    if isinstance(a, Record) and isinstance(b, Record) and len(samples):
        raise ArgumentError(
            "probe.run: both sides are records, which don't run samples. Fix: leave out samples"
        )
    options = {"tokens": tokens, "passes": contract.passes, "memory": memory, "seed": seed}
    left, right = (
        side if isinstance(side, Record) else record(side, samples, **options) for side in (a, b)
    )
    return compare(left, right, contract)
