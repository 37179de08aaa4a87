"""Every kernel of the ops compiles for each target, in each variant, and fits its shared memory."""

import math
from itertools import product

import pytest

pytest.importorskip("triton")
import triton.language as tl
from support.offline_compile import compiled, compiled_size, each_target

from mmpack.ops.attention.fixed_blocks import kernels as attention
from mmpack.ops.attention.fixed_blocks import triton as passes
from mmpack.ops.embeddings import triton as embeddings
from mmpack.ops.linear_attention import triton as conv
from mmpack.ops.logprobs import triton as logits
from mmpack.ops.logprobs.linear import backward_kernels, forward_kernel, product_kernels, tiles
from mmpack.ops.logprobs.lists import list_kernels, sum_kernels
from mmpack.ops.logprobs.lists.triton import LANES, LONG_LANES
from mmpack.ops.norms import triton as norms
from mmpack.ops.patches import triton as patches
from mmpack.ops.products import tiles as product_tiles
from mmpack.ops.products import triton as products
from mmpack.ops.projection import triton as projection
from mmpack.ops.rows import triton as rows

pytestmark = pytest.mark.compile
NO_YES = (False, True)
WIDE, NARROW = {"BLOCK_ROWS": 1, "BLOCK_COLS": 1024}, {"BLOCK_ROWS": 512, "BLOCK_COLS": 2}
SUMS = {"fp64": tl.float64}
NUMBERS = "fp32: scale softcap to_cap eps share;"


def variant(kernel, types, none="", options=None, **constants):
    """A kernel, its signature and constants, and how it is launched.

    `types`: "type: names; …", of which later ones count; whatever else the kernel takes is int32. `none`: arguments
    that are None.
    """
    constants |= dict.fromkeys(none.split())
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    kinds = {}
    for part in filter(str.strip, types.split(";")):
        kind, names = part.split(":")
        kinds |= dict.fromkeys(names.split(), kind.strip())
    names = [name for name in kernel.arg_names if name not in constants]
    return kernel, {n: kinds.get(n, "i32") for n in names}, constants, options or {}


def copies(target):
    words = ("i64", 2), ("i64", 1), ("i16", 1), ("i8", 1)
    for (word, unit), index, none in product(words, ("i32", "i64"), ("read", "write")):
        shape = WIDE if unit == 2 or index == "i32" else NARROW
        types = f"*{word}: source out; *{index}: read write"
        yield variant(rows.copy_kernel, types, none, UNIT=unit, **shape)
    yield variant(projection.fill_kernel, "*i64: text out; *i32: source target", UNIT=2, **WIDE)


def sums(target):
    for word, unit in (("bf16", 2), ("fp16", 1), ("fp32", 2), ("fp64", 1)):
        types, add = f"*{word}: values out; *i32: order offsets", SUMS.get(word, tl.float32)
        shape = WIDE if unit == 2 else NARROW
        yield variant(rows.sum_kernel, types, UNIT=unit, SUM=add, **shape)


def merges(target):
    for levels in (0, 3):
        for kernel, word, unit, several in (
            (embeddings.merge_kernel, "i64", 2, ("levels", "taken")),
            (embeddings.unmerge_kernel, "bf16", 8, ("grad_levels", "to_levels")),
        ):
            types = f"*i32: source index vision order offsets; *{word}: embeddings features merged"
            types += " grad to_embeddings to_features"
            made = variant(kernel, types, UNIT=unit, LEVELS=levels, SUM=tl.float32, **WIDE)
            made[1].update(dict.fromkeys(several, (f"*{word}",) * levels))
            yield made


def of_tiles(target):
    """Of this target's tile: constants, how it is launched, and a maker of descriptors by names of sides."""
    tile = {"sm_80": tiles.AMPERE, "sm_90": tiles.HOPPER, "gfx942": tiles.CDNA3}[target]
    side = {"rows": tile.rows, "columns": tile.columns, "depth": tile.depth}
    sizes = {name.upper(): size for name, size in side.items()}
    side["half"] = tile.columns // 2

    def described(word, a, b):
        return f"tensordesc<{word}[{side[a]}, {side[b]}]>"

    launch = {"num_warps": tile.warps, "num_stages": tile.stages}
    return sizes | {"GROUP": tile.group, "PROGRAMS": 132}, launch, described


FLOATS = "*fp32: maximum_ptr total_ptr weighted_ptr log_total_ptr along_ptr slope_ptr"


def linear(target):
    sizes, launch, block = of_tiles(target)
    for word, extras in product(("bf16", "fp16"), NO_YES):
        types = (
            f"{NUMBERS} {FLOATS}; *i32: live_ptr; *{word}: bias_ptr; {block(word, 'rows', 'depth')}: x_desc;"
            f"{block(word, 'columns', 'depth')}: weight_desc;"
            f"{block(word, 'rows', 'columns')}: stored_desc grad_desc"
        )
        none = "" if extras else "bias_ptr slope_ptr"
        flags = {"ENTROPY": extras, "SOFTCAP": extras}
        for store in NO_YES:
            without = none if store else f"{none} stored_desc"
            kernel = forward_kernel.statistics_kernel
            yield variant(kernel, types, without, launch, STORE=store, **flags, **sizes)
        kernel = backward_kernels.logit_gradient_kernel
        yield variant(kernel, types, none, launch, **flags, **sizes)
        types = (
            f"*i32: live_ptr; {block(word, 'rows', 'depth')}: grad_by_row;"
            f"{block(word, 'depth', 'columns')}: weight_desc x_desc;"
            f"{block(word, 'depth', 'rows')}: grad_by_column;"
            f"{block('fp32', 'rows', 'half')}: total_desc;"
            f"{block(word, 'rows', 'half')}: grad_weight_desc"
        )
        flags, kernel = (
            {"ADD": extras, "REDUCE": target == "sm_90"},
            product_kernels.products_kernel,
        )
        for none in ("", "grad_weight_desc", "total_desc"):
            yield variant(kernel, types, none, launch, **flags, **sizes)


def small_linear(target):
    sizes, launch, _ = of_tiles(target)
    kept = {"ROWS": 32, "TILE_ROWS": sizes["ROWS"], "COLUMNS": sizes["COLUMNS"]}
    chosen = {"TOKENS": min(sizes["ROWS"], 64), "DEPTH": 2 * sizes["DEPTH"]}
    launched = {
        forward_kernel.merge_kernel: {"ROWS": 32, "TILES": 64},
        forward_kernel.target_kernel: chosen,
        backward_kernels.stored_logit_gradient_kernel: kept,
        backward_kernels.set_targets_kernel: {"TOKENS": 256},
        backward_kernels.column_sums_kernel: {"ROWS": 64, "COLUMNS": 64},
        product_kernels.gather_rows_kernel: {"COLUMNS": 1024},
        product_kernels.scatter_rows_kernel: {"COLUMNS": 1024},
    }
    types = (
        f"{NUMBERS} {FLOATS} tile_maximum_ptr tile_total_ptr tile_weighted_ptr entropy_ptr logit_ptr value_ptr;"
        "*bf16: x_ptr weight_ptr bias_ptr grad_ptr stored_ptr out_ptr hidden_ptr; *i32: live_ptr;"
        "*i64: slot_ptr column_ptr order_ptr row_ptr"
    )
    for extras, (kernel, own) in product(NO_YES, launched.items()):
        none, flags = "" if extras else "bias_ptr slope_ptr", {"ENTROPY": extras, "SOFTCAP": extras}
        stages = launch["num_stages"] if own is chosen else 2
        options = {"num_warps": 4, "num_stages": stages}
        yield variant(kernel, types, none, options, **flags, **own)


def projections(target):
    sizes, launch, block = of_tiles(target)
    words = ("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "fp32")
    for (word, out), by_depth in product(words, NO_YES):
        weight = block(word, *(("depth", "columns") if by_depth else ("columns", "depth")))
        types = f"*{word}: bias_ptr; *{out}: out_ptr; *i32: target_ptr; {weight}: weight_desc;"
        types += f"{block(word, 'rows', 'depth')}: x_desc"
        none = "bias_ptr target_ptr" if by_depth else ""  # the gradient of the inputs
        yield variant(projection.project_kernel, types, none, launch, BY_DEPTH=by_depth, **sizes)


def selected(target):
    types = (
        "*fp32: logprobs maximum log_total entropies grad_logprobs grad_entropies; *fp64: temperature;"
        "i64: row_stride out_row_stride; *i32: slot_of_row; *i64: targets order offsets;"
    )
    named = (
        ("rows order offsets slot_of_row", ""),
        ("order offsets", "*i32: rows;"),
        ("", "*i64: rows;"),
    )
    launch = {"num_warps": 2 if target == "gfx942" else 4}
    words = ("bf16", True), ("bf16", False), ("fp32", True), ("fp16", False)
    for (word, entropy), (none, index) in product(words, named):
        own, tokens = types + index + f"*{word}: logits out", 1 if none else logits.TOKENS
        sizes = {"TOKENS": tokens, "LANES": logits.LANES, "DEPTH": logits.DEPTH}
        without = none if entropy else f"{none} entropies"
        yield variant(logits.forward_kernel, own, without, launch, **sizes)
        for left_out in ("rows", "slot_of_row"):  # dense, compact
            without = f"{none} {left_out} {'' if entropy else 'grad_entropies'}"
            sizes = {"TOKENS": tokens, "BLOCK": logits.BLOCK}
            yield variant(logits.backward_kernel, own, without, launch, **sizes)


def lists(target):
    types = (
        f"{NUMBERS} *i64: ids starts targets rows columns places index order offsets slot_runs;"
        "*fp32: logprobs entry_logits grad_logprobs values partial out;"
        "*fp64: temperature maximum log_total entropies grad_entropies;"
    )
    k, s = list_kernels, sum_kernels
    for word, extras in product(("bf16", "fp32"), NO_YES):
        own = f"{types} *{word}: hidden weight bias source block"
        flags = {"ENTROPY": extras, "SOFTCAP": extras, "PUT": extras}
        one, launch = {"num_warps": 1}, {"num_warps": s.WARPS}
        yield variant(k.statistics_kernel, own, "", one, LANES=LANES, **flags)
        none = "" if extras else "grad_entropies"
        yield variant(k.slopes_kernel, own, none, one, LANES=LANES, **flags)
        yield variant(k.window_kernel, own, "", {"num_warps": 4}, LANES=LONG_LANES, **flags)
        sizes = {"ENTRIES": s.ENTRIES, "DEPTH": s.DEPTH}
        none = "" if extras else "bias"
        yield variant(s.dots_kernel, own, none, launch, **sizes, **flags)
        own += f"; *{word}: out; *fp32: scale"
        sizes = {"PIECE": s.PIECE, "COLUMNS": s.COLUMNS, "AT_ONCE": s.AT_ONCE}
        yield variant(s.sum_runs_kernel, own, "order" if extras else "places", launch, **sizes)
        yield variant(s.sum_pieces_kernel, own, "order" if extras else "", launch, **sizes)
        yield variant(s.join_pieces_kernel, own, "" if extras else "places", launch, **sizes)


def videos(target):
    def shape(patch, last, value, merge=2, temporal=2):
        unit = math.gcd(4, patch) if value == "u8" else 1
        items = 1 << (temporal * patch**2 // unit - 1).bit_length()
        sizes = {"PATCH": patch, "MERGE": merge, "TEMPORAL": temporal, "LAST": last}
        return {1: value, 2: "i16", 4: "i32"}[unit], sizes | {"UNIT": unit, "ITEMS": items}

    numbers = " ".join(f"{name}_{c}" for name in ("mean", "std", "inverse") for c in range(3))
    tables = f"*i64: shifts patches; *i32: blocks; fp32: {numbers} scale;"
    changes = (
        ("u8", "fp32", "normalise"),
        ("u8", "bf16", "normalise"),
        ("u8", "fp32", "rescale"),
        ("u8", "u8", "copy"),
        ("bf16", "bf16", "copy"),
        ("fp64", "fp64", "copy"),
    )
    for (patch, last), (value, made, change) in product([(14, True), (16, False)], changes):
        word, sizes = shape(patch, last, value)
        sizes |= {"CHANGE": change, "REPEAT": value != "bf16", "BYTES": made == "bf16"}
        types = f"{tables} *{word}: frames; *{made}: out"
        yield variant(patches.pack_kernel, types, SEVERAL=last, **sizes)
    for value, *geometry in (("u8", 14), ("fp32", 16), ("bf16", 14), ("fp64", 14, 1, 1)):
        for total, last in ((value != "u8", True), (False, False)):
            word, sizes = shape(geometry[0], last, value, *geometry[1:])
            sizes |= {"TOTAL": total, "SUM": SUMS.get(value, tl.float32)}
            yield variant(patches.unpack_kernel, f"{tables} *{word}: rows out", **sizes)
    for out in ("fp32", "bf16", "fp16"):
        types = f"*u8: rows; *fp32: values; *{out}: out; i64: count"
        yield variant(patches.normalize_kernel, types, PLANE=392, BLOCK=patches.NORMALIZED)


def multiplied(target):
    menu = {
        "sm_90": (*product_tiles.HOPPER, product_tiles.HOPPER_FEW),
        "sm_80": (*product_tiles.AMPERE, product_tiles.AMPERE_FEW),
        "gfx942": product_tiles.CDNA3,
    }[target]
    ways = ((False, False), "bf16"), ((True, True), "fp32")
    for shape, ((a_by_depth, b_by_depth), out) in product(menu, ways):
        high, wide, depth, group, warps, stages = shape
        a = [depth, high] if a_by_depth else [high, depth]
        b = [depth, wide] if b_by_depth else [wide, depth]
        types = f"tensordesc<bf16{a}>: a_desc; tensordesc<bf16{b}>: b_desc; *bf16: bias_ptr;"
        types += f"tensordesc<{out}[{high}, {wide // 2}]>: out_desc"
        sizes = {"ROWS": high, "COLUMNS": wide, "DEPTH": depth, "GROUP": group}
        sizes["PROGRAMS"] = 0 if product_tiles.is_few(shape) else 132
        options = {"num_warps": warps, "num_stages": stages}
        ways = {"A_BY_DEPTH": a_by_depth, "B_BY_DEPTH": b_by_depth}
        yield variant(products.product_kernel, types, "", options, **ways, **sizes)
    sizes = {"ROWS": products.ROWS, "COLUMNS": products.COLUMNS, "DEPTH": products.DEPTH}
    options, types = {"num_warps": 4, "num_stages": 2}, "*fp32: a_ptr b_ptr out_ptr bias_ptr"
    for precision in ("ieee",) if target == "gfx942" else ("ieee", "tf32"):
        yield variant(products.general_kernel, types, "", options, PRECISION=precision, **sizes)


def normed(target):
    for word in ("bf16", "fp32"):
        types = f"{NUMBERS} *{word}: x_ptr weight_ptr out_ptr grad_ptr to_x_ptr; *fp32: partial_ptr"
        for kernel in (norms.row_sum_kernel, norms.rms_norm_kernel):
            yield variant(kernel, types, "", {"num_warps": 8}, BLOCK=4096)
        for block, whole in ((4096, True), (8192, False)):
            sizes = {"WEIGHT": True, "BLOCK": block, "WHOLE": whole}
            yield variant(norms.rms_norm_backward_kernel, types, "", {"num_warps": 8}, **sizes)


def fixed_blocks(target):
    cases = ("bf16", 128, passes.HALF), ("bf16", 256, passes.WIDE), ("fp32", 128, passes.FULL)
    for (word, size, tile), causal in product(cases, NO_YES):
        types = (
            f"{NUMBERS} *i32: cu_q_ptr cu_k_ptr; *fp32: lse_ptr delta_ptr;"
            f"*{word}: q_ptr k_ptr v_ptr grad_ptr out_ptr to_q_ptr to_k_ptr to_v_ptr"
        )
        shared = {"CAUSAL": causal, "GROUPS": 7, "PRECISION": "ieee", "SIZE": size}
        for kernel, blocks in (
            (attention.forward_kernel, tile.forward),
            (attention.keys_kernel, tile.to_keys),
            (attention.queries_kernel, tile.to_queries),
        ):
            options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
            sizes = shared | {"QUERIES": blocks.queries, "KEYS": blocks.keys}
            yield variant(kernel, types, "", options, **sizes)
        yield variant(attention.delta_kernel, types, ROWS=passes.DELTA_ROWS, SIZE=size)


def convolutions(target, words=("bf16", "fp32")):
    shared = {"TAPS": 4, "SILU": True, "UNROLL": conv.UNROLL, "EARLY": conv.UNROLL}
    launch = {"num_warps": conv.WARPS}
    for word, flag in product(words, NO_YES):
        types = (
            f"*{word}: grad_ptr x_ptr weight_ptr bias_ptr to_x_ptr out_ptr; *fp32: partial_ptr;"
            "*i32: previous_ptr rows_ptr offsets_ptr readers_ptr"
        )
        sizes = shared | {"BIAS": flag, "WEIGHT": flag, "READERS": conv.FAR_READERS}
        for kernel, high, wide in (
            (conv.conv1d_backward_kernel, conv.BACKWARD_ROWS, conv.BLOCK_COLS),
            (conv.conv1d_kernel, conv.ROWS, conv.BLOCK_COLS),
            (conv.far_kernel, None, conv.FAR_COLS),
        ):
            yield variant(kernel, types, "", launch, ROWS=high, BLOCK_COLS=wide, **sizes)


GROUPS = (
    copies, sums, merges, linear, small_linear, projections, selected, lists, videos, multiplied,
    normed, fixed_blocks, convolutions,
)  # fmt: skip


@each_target
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_they_compile(target, group):
    for kernel, signature, constants, options in group(target):
        assert compiled_size(kernel, signature, constants, target, **options) > 0, signature


@pytest.mark.parametrize("weight", NO_YES)
def test_rounding_of_the_convolution_is_not_left_to_the_compiler(weight):
    """It has no product and sum to fuse: so gradients of x have the same bits whether the weight is trained."""
    made = [v for v in convolutions("sm_90", ("fp32",)) if v[0] is conv.conv1d_backward_kernel]
    (kernel, signature, constants, options) = made[weight]
    counts = [
        compiled(kernel, signature, constants, "sm_90", **options, enable_fp_fusion=fusion)
        .asm["ptx"].count("fma.rn.f32")
        for fusion in NO_YES
    ]  # fmt: skip
    assert counts[0] == counts[1] > 0
