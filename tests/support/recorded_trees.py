"""Random trees of turns with all that an engine tells of them, and plain scripts that write them as frameworks do.

Each writer follows the fields that the framework documents; none uses mmpack's readers.
"""

from __future__ import annotations

import base64
import io
from functools import cache
from typing import Any

import numpy as np
from hypothesis import strategies as st
from support.trajectories import joined, screen, shot

from mmpack.schema.ragged import Ragged
from mmpack.schema.routes import compact_routes
from mmpack.schema.spans import PolicyVersion
from mmpack.trajectory import Turn

WORDS = st.lists(st.integers(0, 3), min_size=1, max_size=3)


@cache
def processor() -> Any:
    import mmpack as mp
    from mmpack.demo.qwen_processor import qwen_vl_processor

    return mp.wrap_processor(qwen_vl_processor("qwen2_5_vl"))


def drawn(seed: int, size: tuple[int, int] = (84, 56)) -> Any:
    """A picture of noise."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def routes_of(ids: list[int]) -> np.ndarray:
    """[n, 1, 2]: they follow from id and place, so equal histories took equal routes."""
    return compact_routes([[[i % 64, 64 + k % 60]] for k, i in enumerate(ids)], 128)


def kept_of(ids: list[int]) -> list[list[int]]:
    return [[i, i + 1, i + 2] for i in ids]


def turn_of(context: Any, response: list[int], number: int) -> Turn:
    """A turn with everything; logprobs are its own, so equal ones are one turn."""
    ids, media = context
    start, half = len(ids), len(response) // 2
    logprobs = [-(number + 1) / 8 - k / 64 for k in range(len(response))]
    versions = [(start, start + half, f"v{number}"), (start + half, start + len(response), "v9")]
    return Turn(
        ids,
        response,
        media,
        logprobs,
        policy_versions=[PolicyVersion(a, b, v) for a, b, v in versions if a < b],
        kept_ids=Ragged.of(kept_of(response)),
        teachers={
            "teacher": Ragged.of(
                [[i, 7] for i in response],
                [[-1.0, -2.0]] * half + [[-0.5, -3.0]] * (len(response) - half),
            )
        },
        routed_experts=routes_of([*ids, *response]),
        finish_reason="stop",
    )


@st.composite
def trees(draw: st.DrawFn, pictures: bool = True) -> list[Turn]:
    """Turns in the order in which they were sampled: they grow, fork, are sampled again, or see something new."""
    shots = st.sampled_from(["a0", "b0", "b1"]).map(shot)
    turns: list[Turn] = []
    for number in range(draw(st.integers(1, 6))):
        picture = pictures and draw(st.booleans())
        new = screen(draw(WORDS), draw(shots)) if picture else (draw(WORDS), [])
        how = draw(st.sampled_from(["grow", "fork", "again", "new"])) if turns else "new"
        context = new
        if how != "new":
            at = turns[-1] if how == "grow" else draw(st.sampled_from(turns))
            seen = at.context_ids.tolist()
            context = (seen, at.media)
            if how != "again":
                context = joined((seen + at.response_ids.tolist(), at.media), new)
        turns.append(turn_of(context, draw(WORDS), number))
    return turns


def parents(turns: list[Turn]) -> list[int | None]:
    """The turn that each goes on from, by plain tuples: the longest, and of equal ones the newest."""
    out: list[int | None] = []
    for k, turn in enumerate(turns):
        context, keys = tuple(turn.context_ids.tolist()), [m.cache_key for m in turn.media]
        found = None
        for j in range(k):
            other = (*turns[j].context_ids.tolist(), *turns[j].response_ids.tolist())
            seen = [m.cache_key for m in turns[j].media]
            longer = found is None or len(other) >= len(turns[found])
            if context[: len(other)] == other and keys[: len(seen)] == seen and longer:
                found = j
        out.append(found)
    return out


def chains(turns: list[Turn]) -> list[list[int]]:
    """Each turn once: with the one that it goes on from, unless another did that before."""
    out: list[list[int]] = []
    for k, parent in enumerate(parents(turns)):
        own = next((c for c in out if c[-1] == parent), None) if parent is not None else None
        if own is None:
            out.append([k])
        else:
            own.append(k)
    return out


def said(turns: list[Turn]) -> list[Any]:
    """All that must come back of each turn, as plain values."""
    return [
        (
            t.context_ids.tolist(),
            t.response_ids.tolist(),
            [m.cache_key for m in t.media],
            None if t.logprobs is None else t.logprobs.tolist(),
            [] if t.loss_spans is None else [(s.start, s.stop) for s in t.loss_spans],
        )
        for t in turns
    ]


def versions(turn: Turn) -> list[Any]:
    return [(v.start, v.stop, v.version) for v in turn.policy_versions or ()]


# ---- writers -------------------------------------------------------------------------------------


def npy(array: np.ndarray) -> str:
    """As vLLM's server writes an array."""
    with io.BytesIO() as buffer:
        np.save(buffer, array, allow_pickle=False)
        return base64.b64encode(buffer.getvalue()).decode()


def vllm_calls(turns: list[Turn], routes: bool = True) -> list[dict[str, Any]]:
    """`/inference/v1/generate` as JSON: vllm/entrypoints/scale_out/token_in_token_out/protocol.py of 0.32.

    Turns of one context that follow each other are choices of one call.
    """
    calls: list[dict[str, Any]] = []
    for k, turn in enumerate(turns):
        ids = turn.response_ids.tolist()
        start = len(turn.context_ids)
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": ids,
            "logprobs": {
                "content": [
                    {"token_id": i, "logprob": float(v), "rank": 1, "top_logprobs": []}
                    for i, v in zip(ids, turn.logprobs, strict=True)
                ]
            },
            "routed_experts": npy(turn.routed_experts[:-1]) if routes else None,
            "sampling_mask": kept_of(ids),
            "weight_versions": [
                {"version": v.version, "start": v.start - start, "end": v.stop - start}
                for v in turn.policy_versions
            ],
        }
        prompt = turn.context_ids.tolist()
        keys = [m.cache_key for m in turn.media]
        same = calls and calls[-1]["response"]["prompt_token_ids"] == prompt
        if same and calls[-1]["request"]["features"]["mm_hashes"]["image"] == keys:
            choice["index"] = len(calls[-1]["response"]["choices"])
            calls[-1]["response"]["choices"].append(choice)
            continue
        offsets = [i for i, t in enumerate(prompt) if t == 151655 and prompt[i - 1] != 151655]
        ranges = [
            {"offset": o, "length": m.num_tokens} for o, m in zip(offsets, turn.media, strict=True)
        ]
        request = {
            "request_id": f"r{k}",
            "token_ids": prompt,
            "features": {"mm_hashes": {"image": keys}, "mm_placeholders": {"image": ranges}},
            "sampling_params": {"temperature": 0.7, "top_k": 3, "top_p": 0.9},
        }
        response = {"request_id": f"r{k}", "prompt_token_ids": prompt, "choices": [choice]}
        calls.append({"request": request, "response": response})
    return calls


def verl_rows(turns: list[Turn]) -> list[dict[str, Any]]:
    """A session's chains: uni_agent/gateway/session/types.py, `Trajectory`, in the order of their last answers."""
    rows = []
    for chain in sorted(chains(turns), key=lambda c: c[-1]):
        first, last = turns[chain[0]], turns[chain[-1]]
        start, ids = len(first.context_ids), last.input_ids.tolist()
        mask, logprobs = [0] * len(ids), [0.0] * len(ids)
        teacher_ids, teacher_logprobs = [[0, 0]] * len(ids), [[0.0, 0.0]] * len(ids)
        for k in chain:
            at = len(turns[k].context_ids)
            lists, scored = turns[k].teachers["teacher"], turns[k].logprobs
            for i in range(len(turns[k].response_ids)):
                mask[at + i], logprobs[at + i] = 1, float(scored[i])
                own = slice(lists.offsets[i], lists.offsets[i + 1])
                # row t - 1 is of token t: verl leaves out the first prompt logprob, which is None
                teacher_ids[at + i - 1] = lists.ids[own].tolist()
                teacher_logprobs[at + i - 1] = lists.logprobs[own].tolist()
        rows.append(
            {
                "prompt_ids": ids[:start],
                "response_ids": ids[start:],
                "response_mask": mask[start:],
                "response_logprobs": logprobs[start:],
                "reward_info": {"reward": 0.5, "finished": True},
                "num_turns": 2 * len(chain),
                "routed_experts": last.routed_experts[:-1].astype(np.int32),
                "multi_modal_data": {"images": list(last.media)} if last.media else None,
                "extra_fields": {
                    "min_global_steps": 3,
                    "max_global_steps": 3,
                    "teacher_ids": np.array(teacher_ids, np.int32),
                    "teacher_logprobs": np.array(teacher_logprobs, np.float32),
                },
            }
        )
    return rows


def skyrl_output(episodes: list[list[Turn]]) -> dict[str, Any]:
    """Step-wise `GeneratorOutput`: skyrl/train/generators/base.py; a row per turn, without pictures."""
    rows = [(e, k, t) for e, turns in enumerate(episodes) for k, t in enumerate(turns)]
    last = [k == len(episodes[e]) - 1 for e, k, _ in rows]
    return {
        "prompt_token_ids": [t.context_ids.tolist() for _, _, t in rows],
        "response_ids": [t.response_ids.tolist() for _, _, t in rows],
        "rewards": [1.0 if end else 0.0 for end in last],
        "loss_masks": [[1] * len(t.response_ids) for _, _, t in rows],
        "stop_reasons": ["stop"] * len(rows),
        "rollout_metrics": {},
        "rollout_logprobs": [t.logprobs.tolist() for _, _, t in rows],
        "trajectory_ids": [{"instance_id": "task", "repetition_id": e} for e, _, _ in rows],
        "rollout_expert_indices": [t.routed_experts[:-1] for _, _, t in rows],
        "is_last_step": last,
        "env_metrics": None,
    }


def trace(turns: list[Turn]) -> dict[str, Any]:
    """A trace of verifiers 0.4 (verifiers/v1/graph.py, trace.py): a node holds the tokens that its message adds."""
    nodes: list[dict[str, Any]] = []
    node_of: dict[int, int] = {}  # turn -> its node
    prompts: dict[Any, int] = {}  # context -> its node
    for k, (turn, parent) in enumerate(zip(turns, parents(turns), strict=True)):
        ids = turn.context_ids.tolist()
        begin = 0 if parent is None else len(turns[parent])
        seen = 0 if parent is None else len(turns[parent].media)
        key = (parent, tuple(ids), tuple(m.cache_key for m in turn.media))
        if key not in prompts and len(ids) > begin:
            content = [
                {"type": "image_url", "image_url": {"url": m.cache_key}} for m in turn.media[seen:]
            ]
            nodes.append(
                {
                    "parent": None if parent is None else node_of[parent],
                    "message": {"role": "user", "content": content},
                    "sampled": False,
                    "token_ids": ids[begin:],
                    "mask": [False] * (len(ids) - begin),
                    "logprobs": [],
                    "routed_experts": turn.routed_experts[begin : len(ids)],
                }
            )
            prompts[key] = len(nodes) - 1
        above = prompts.get(key, None if parent is None else node_of[parent])
        answer = turn.response_ids.tolist()
        lists = kept_of(answer)
        nodes.append(
            {
                "parent": above,
                "message": {"role": "assistant", "content": "…"},
                "sampled": True,
                "token_ids": answer,
                "mask": [True] * len(answer),
                "logprobs": turn.logprobs.tolist(),
                "reference_logprobs": (turn.logprobs - 1).tolist(),
                "routed_experts": turn.routed_experts[len(ids) :],
                "sampling_mask": {
                    "ids": np.array([i for own in lists for i in own], np.int32),
                    "counts": np.array([len(own) for own in lists], np.int32),
                },
            }
        )
        node_of[k] = len(nodes) - 1
    return {
        "id": "t",
        "nodes": nodes,
        "calls": [{"node": n, "finish_reason": "stop"} for n in node_of.values()],
        "rewards": {"task": {"score": 0.5, "weight": 2.0}, "form": {"score": 0.25, "weight": 1.0}},
        "metrics": {"turns": float(len(turns))},
        "stop_condition": "done",
    }


def training_samples(turns: list[Turn]) -> list[dict[str, Any]]:
    """prime_rl/transports/rollouts/types.py: one per leaf; what branches share is sampled in the first of them only."""
    above = parents(turns)
    leaves = [k for k in range(len(turns)) if k not in above]
    rows, done = [], set()
    for leaf in leaves:
        path: list[int] = [leaf]
        while (up := above[path[-1]]) is not None:
            path.append(up)
        ids = turns[leaf].input_ids.tolist()
        mask, logprobs = [False] * len(ids), [0.0] * len(ids)
        for k in path[::-1]:
            start = len(turns[k].context_ids)
            for i, value in enumerate(turns[k].logprobs.tolist()):
                logprobs[start + i] = value
                mask[start + i] = k not in done
            done.add(k)
        routes = turns[leaf].routed_experts
        rows.append(
            {
                "token_ids": ids,
                "mask": mask,
                "logprobs": logprobs,
                "temperatures": [0.7] * len(ids),
                "env_name": "env",
                "routed_experts": {
                    "data": routes.tobytes(),
                    "shape": list(routes.shape),
                    "dtype": str(routes.dtype),
                },
            }
        )
    return rows
