"""Breakdown of a compiled program into kinds of kernels: their FLOPs, bytes, and estimated seconds.

It shows a regression in a step, such as copies in front of a kernel, without a device.
"""

import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kernels.attention import ALL_PAIRS
from kernels.delta_rule.shared import channel_products, fused_products, scan_flops
from train.base.chips import Chip
from train.planning import hlo


# The kinds of kernels, in the order they are printed.
PRODUCTS, GROUPED = "matrix products", "matrix products by expert"
FORWARD, BACKWARD = "attention, forward kernels", "attention, backward kernels"
RECURRENCE = "recurrences, kernels over chunks"
OPTIMIZER, ELEMENTWISE = "optimizer", "elementwise, norms, sums"
COPIES, SCATTERS, OTHER = "copies, slices, casts, fills", "scatters", "other kernels"
ASIDE = "copies beside other kernels"  # copies that XLA starts, and awaits later
ORDER = (PRODUCTS, GROUPED, FORWARD, BACKWARD, RECURRENCE, OPTIMIZER, ELEMENTWISE, COPIES, SCATTERS, OTHER, ASIDE)
SCOPE = "optimizer"  # the `jax.named_scope` of train.step's update

# Shares of the bfloat16 peak that kernels of attention reach, forward and backward, and kernels of products by expert.
# The shares of our kernels are predicted from their machine code for an H100: forward 400 TFLOP/s by Triton and 560 by
# Mosaic; backward 300 and 310, counting the five products that are needed, while the kernels compute seven (the logits
# and their gradients twice). cuDNN's are measured on an H100, at head size 128 and 8,192 tokens: forward by tokamax
# (629), backward in FlashAttention-3's paper (arXiv:2407.08608, 540; it computes five). TPUs' are predicted from
# schedules for a v6e.
ATTENTION = {"triton": (0.40, 0.42), "cudnn": (0.63, 0.54), "mosaic_gpu": (0.57, 0.44), "tpu": (0.28, 0.39)}
EXPERTS = {"triton": 0.45, "mosaic_gpu": 0.50, "tpu": 0.60}

# Products of each attention kernel for a pair of tokens: how many have a query's width, and how many a value's.
WIDTHS = {"forward": (1, 1), "dkv": (2, 2), "dk": (2, 1), "dv": (1, 1), "dq": (2, 1)}
LIBRARY = re.compile(r'custom_call_target="(?:__gpu\$xla\.gpu\.)?(triton|mosaic_gpu|tpu|__cublas|__cudnn\$fmha)')

# Instructions that start no kernel, or whose kernel is counted where it is started.
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier", "custom-call", "async-done", "async-update", "copy-done", "fusion-done", "slice-done",
    "add-dependency",
}  # fmt: skip
MOVES = FREE | {
    "bitcast-convert", "reshape", "copy", "copy-start", "slice-start", "transpose", "broadcast", "iota", "slice",
    "dynamic-slice", "dynamic-update-slice", "concatenate", "pad", "reverse", "convert", "gather",
}  # fmt: skip
ELEMENT = re.compile(r"\w+\[[\d,]*\](?:\{[^}]*\})?")


class Kernel(NamedTuple):
    """One kernel of a program."""

    kind: str
    flops: float  # FLOPs of one run; a multiplication and an addition are two
    bytes: float  # bytes that one run reads and writes in the device's memory
    times: int  # number of runs in a step
    share: float = 0.0  # share of the chip's peak that the kernel reaches; 0: the share of matrix products

    def seconds(self, chip: Chip) -> float:
        """Estimates the seconds of one run: the longer of arithmetic and traffic, at reached rates, not at peaks."""
        arithmetic = self.flops / (chip.flops * (self.share or chip.products))
        return max(arithmetic, self.bytes / (chip.bandwidth * chip.streaming))


class Part(NamedTuple):
    """All kernels of one kind, in a step of one device."""

    flops: float
    bytes: float
    seconds: float
    kernels: int  # number of kernels that are started


def parts(kernels: Sequence[Kernel], chip: Chip) -> dict[str, Part]:
    """Sums kernels by kind, in the order of `ORDER`."""
    found = {kind: [each for each in kernels if each.kind == kind] for kind in ORDER}
    total = lambda many, one: sum((each.times * one(each) for each in many), 0.0)
    return {
        kind: Part(
            total(many, lambda each: each.flops),
            total(many, lambda each: each.bytes),
            total(many, lambda each: each.seconds(chip)),
            sum(each.times for each in many),
        )
        for kind, many in found.items()
        if many
    }


def kernels(text: str, seen: float = 1.0, filled: float = 1.0) -> list[Kernel]:
    """Lists the kernels in the text of an optimized module, without collectives.

    A kernel in a loop counts once for each turn of the loop. In a conditional, the branch counts where the condition
    holds, since all our conditions test for the usual case. Bytes that a slice, a gather or an update in place does not
    touch do not count, nor do bytes that stay in a TPU's fast memory.

    Args:
        seen: the share of all pairs of a row's tokens that attention's kernels compute, such as a half. Kernels of
            encoders, whose mask is `kernels.Full`, compute all.
        filled: the share of rows with tokens in the buffers of products by expert; only these rows are read and
            computed, while results are written whole, with zeros.
    """
    computations = dict(hlo.parse(text))
    entry = next(name for name in computations if name.startswith("ENTRY "))
    program: dict[str, Computation] = {}
    program |= {name: Computation(lines, program) for name, lines in computations.items()}

    def visit(name: str, times: int, turns: int) -> Iterator[Kernel]:
        for i in program[name].instructions:
            if i.op == "while":
                n = hlo.trips(i.line, computations)
                yield from visit(i.called("body")[0], times * n, n)
            elif i.op == "conditional":
                *_, usual = i.called("false_computation", "true_computation", "branch_computations")
                yield from visit(usual, times, turns)
            elif i.op in ("call", "async-start"):
                for called in i.called("to_apply", "calls"):
                    found = visit(called, times, turns)
                    yield from map(_aside, found) if i.op == "async-start" else found
            elif LIBRARY.search(i.line) or (i.op not in FREE and re.sub("-(start|done)$", "", i.op) not in hlo.KINDS):
                each = _kernel(i, program[name], seen, filled, turns)._replace(times=times)
                yield _aside(each) if " fusion-start(" in i.line else each

    return list(visit(entry, 1, 1))


class Instruction(NamedTuple):
    """A line of a computation: `%name = result op(operands), ...`."""

    name: str
    result: str
    op: str
    operands: list[str]
    line: str

    @property
    def shape(self) -> tuple[int, ...]:
        return _shape(self.result)

    def called(self, *words: str) -> list[str]:
        """Returns the names of the computations that the line has for these words, such as "body"."""
        found = (text for word in words for text in re.findall(rf"\b{word}=(\{{[^}}]*\}}|%?[\w.-]+)", self.line))
        return [name for text in found for name in re.findall(r"[\w.-]+", text)]


class Computation:
    """The instructions of a computation, and its arrays by name; "name#1" is a part of a tuple."""

    def __init__(self, lines: list[str], program: Mapping[str, "Computation"]):
        self.program = program
        found = [match for match in map(hlo.INSTRUCTION.match, lines) if match]
        # A fusion that is started and awaited later is fusion-start in `Compiled.as_text()`, async-start in XLA's dump.
        op = lambda m: "fusion" if m[3] == "fusion-start" else m[3]
        self.instructions = [Instruction(m[1], m[2], op(m), hlo.names(m[4]), m[0] + m.string[m.end() :]) for m in found]
        self.named = {each.name: each for each in self.instructions}

    def text(self, name: str) -> str:
        """Returns the type of an array, such as "bf16[8,128]{1,0}"; "" if no instruction makes it."""
        name, _, part = name.partition("#")
        result = self.named[name].result if name in self.named else ""
        return ELEMENT.findall(result)[int(part)] if part else result

    def source(self, name: str) -> str:
        """Returns the name of the array that this is another view of, or its own."""
        i = self.named.get(name)
        return self.source(i.operands[0]) if i and i.op == "bitcast" else name

    @functools.cached_property
    def users(self) -> dict[str, list[tuple[Instruction, int]]]:
        """Maps each array to the instructions that read it, each with the number of the operand."""
        found: dict[str, list[tuple[Instruction, int]]] = {each.name: [] for each in self.instructions}
        for each in self.instructions:
            for n, operand in enumerate(each.operands if each.op not in ("parameter", "constant") else ()):
                found.setdefault(operand, []).append((each, n))
        return found

    @functools.cached_property
    def given(self) -> list[str]:
        """Returns the names of the computation's parameters, in order."""
        found = {int(each.operands[0]): each.name for each in self.instructions if each.op == "parameter"}
        return [found[n] for n in sorted(found)]

    @functools.cached_property
    def root(self) -> str:
        """Returns the name of the result."""
        return next(each.name for each in self.instructions if each.line.lstrip().startswith("ROOT "))

    def fused(self, i: Instruction) -> "Computation":
        return self.program[i.called("calls")[0]]

    def inside(self, i: Instruction) -> Iterator[tuple[Instruction, "Computation"]]:
        """Yields the instruction, or the instructions of a fusion, each with its computation."""
        if i.op != "fusion":
            yield i, self
            return
        for each in self.fused(i).instructions:
            yield from self.fused(i).inside(each)

    def read(self, name: str) -> float:
        """Returns the bytes of an array that are read: all, or only those that slices, gathers and updates touch."""
        whole = _bytes(self.text(name))
        through = lambda user, n: self.read(user.name) if user.op == "bitcast" else self.operand(user, n)
        return min(whole, sum(through(*use) for use in self.users[name]))

    def operand(self, i: Instruction, n: int) -> float:
        """Returns the bytes that an instruction reads of its operand `n`."""
        if i.op == "fusion":
            return self.fused(i).read(self.fused(i).given[n])
        if i.op == "slice-start":
            return hlo.bytes_of(ELEMENT.findall(i.result)[1])
        if n == 0 and i.op in ("slice", "dynamic-slice", "gather"):
            return min(_bytes(i.result), _bytes(self.text(i.operands[0])))
        if n == 0 and i.op in ("dynamic-update-slice", "scatter"):
            return _bytes(self.text(i.operands[-1])) if i.op == "scatter" else 0.0
        return _bytes(self.text(i.operands[n]))

    def written(self, name: str) -> float:
        """Returns the bytes of a result that are written: all, or only the new part of an array updated in place."""
        i = self.named.get(name)
        if i and i.op == "tuple":
            return sum(map(self.written, i.operands))
        if i and i.op == "bitcast":
            return self.written(i.operands[0])
        if i and i.op == "fusion":
            return self.fused(i).written(self.fused(i).root)
        if i and i.op == "copy-start":  # (destination, source, a word of context)
            return _bytes(ELEMENT.findall(i.result)[0])
        if i and i.op == "slice-start":  # ((source), destination, a word of context)
            return _bytes(ELEMENT.findall(i.result)[1])
        if i and i.op in ("dynamic-update-slice", "scatter") and self._given(i.operands[0]):
            return _bytes(self.text(i.operands[1 if i.op == "dynamic-update-slice" else -1]))
        return _bytes(self.text(name))

    def _given(self, name: str) -> bool:
        i = self.named.get(name)
        return bool(i) and (i.op == "parameter" or (i.op == "bitcast" and self._given(i.operands[0])))


def _bytes(text: str) -> float:
    """Returns the bytes of arrays in the device's main memory, not in a TPU's fast memory, S(1), or a host's, S(5)."""
    return hlo.bytes_of(" ".join(each for each in ELEMENT.findall(text) if not re.search(r"S\([15]\)", each)))


def _shape(text: str) -> tuple[int, ...]:
    found = re.search(r"\w+\[([\d,]*)\]", text)
    return tuple(int(n) for n in found[1].split(",") if n) if found else ()


def _kernel(i: Instruction, home: Computation, seen: float, filled: float, turns: int) -> Kernel:
    """Describes one kernel: of a fusion, or of a single instruction, in a loop of `turns` turns."""
    inside = list(home.inside(i))
    # A library's kernel that gets a part of an array by its address is in a fusion, too.
    if call := next((each for each in inside if LIBRARY.search(each[0].line)), None):
        return _custom(*call, seen, filled, turns)
    moved = sum(home.operand(i, n) for n in range(len(i.operands))) + home.written(i.name)
    flops = sum(_flops(each, at) for each, at in inside)
    arithmetic = {each.op for each, _ in inside if each.op not in MOVES and not _of_index(each)}
    if f"/{SCOPE}/" in i.line:
        kind = OPTIMIZER
    elif flops:
        kind = PRODUCTS
    else:
        kind = SCATTERS if "scatter" in arithmetic else ELEMENTWISE if arithmetic else COPIES
    return Kernel(kind, flops, moved, 1)


def _parts(texts: list[str], n: int, turns: int) -> int:
    """Returns how many layers operand `n` of a kernel holds, given the operands' types. The kernel reads one of them.

    A loop's kernel reads an array whose first axis is as long as the loop has turns. Outside of loops the number of the
    layer follows the array, and is followed by the array's scales, as in `kernels.stacked.Stacked`.
    """
    shape, number = _shape(texts[n]), re.compile(r"s32\[\](\{|$)")
    if shape[:1] == (turns,):
        return turns
    is_stack = n + 1 < len(texts) and number.match(texts[n + 1])
    is_scale = n > 1 and number.match(texts[n - 1]) and shape[:1] == _shape(texts[n - 2])[:1]
    return shape[0] if shape and (is_stack or is_scale) else 1


def _aside(kernel: Kernel) -> Kernel:
    """Marks a copy as one that runs beside other kernels, and not between them."""
    return kernel._replace(kind=ASIDE) if kernel.kind == COPIES else kernel


def _of_index(i: Instruction) -> bool:
    """Whether an instruction computes a single integer or boolean, such as the start of a slice."""
    return bool(re.match(r"(s32|u32|s64|pred)\[\]", i.result))


def _flops(i: Instruction, home: Computation) -> float:
    """Counts the FLOPs of a product; 0 for other instructions."""
    if i.op == "dot":
        contracted = re.findall(r"lhs_contracting_dims=\{([\d,]*)\}", i.line)
        return _product(i.result, home.text(i.operands[0]), contracted[0].split(","))
    return _convolution(i, home) if i.op == "convolution" else 0.0


def _convolution(i: Instruction, home: Computation) -> float:
    """Counts the FLOPs of a TPU's product, in which a batch or the heads may be a window that is mostly padding."""
    ((left, right, out),) = re.findall(r"dim_labels=(\w+)_(\w+)->(\w+)", i.line)
    said = re.search(r"window=\{([^}]*)\}", i.line)
    window = dict(part.split("=") for part in said[1].split()) if said else {}
    number = lambda key, axis, default: int(window[key].split("x")[axis]) if key in window else default
    results, terms = list(i.shape), _shape(home.text(i.operands[1]))[right.index("i")]
    for axis in range(sum(label.isdecimal() for label in right)):
        places, size = _shape(home.text(i.operands[0]))[left.index(str(axis))], number("size", axis, 1)
        before = int(window["pad"].split("x")[axis].split("_")[0]) if "pad" in window else 0
        spread = number("lhs_dilate", axis, 1)
        first = number("stride", axis, 1) * np.arange(results[out.index(str(axis))])[:, None] - before
        at = first + number("rhs_dilate", axis, 1) * np.arange(size)
        results[out.index(str(axis))] = 1  # counted in `terms`: all terms of this axis's results that are no padding
        terms *= int(np.sum((at >= 0) & (at % spread == 0) & (at // spread < places)))
    return 2.0 * math.prod(results) * terms


def _product(result: str, side: str, contracted: Iterable[str | int]) -> float:
    shape = _shape(side)
    return 2.0 * math.prod(_shape(result)) * math.prod(shape[int(n)] for n in contracted if n != "")


def _custom(i: Instruction, home: Computation, seen: float, filled: float, turns: int) -> Kernel:
    """Describes a kernel of ours or of a library.

    Of an array of all layers it reads one part, and writes one where it changes the array in place (`_parts`).
    """
    target = LIBRARY.findall(i.line)[0]
    texts = [home.text(operand) for operand in i.operands]
    aliases = i.line.partition("output_to_operand_aliasing=")[2].partition(")}")[0]
    in_place = {int(made or 0): int(n) for made, n in re.findall(r"\{(\d*)\}: \((\d+),", aliases)}
    parts = [_parts(texts, n, turns) for n in range(len(texts))]
    made = ELEMENT.findall(re.sub(r"s8\[\d+\]", "", i.result))  # without cuBLAS's workspace
    # An array counts once where a kernel takes it twice, for instance to read two parts of it.
    read = {home.source(i.operands[n]): _bytes(text) / parts[n] for n, text in enumerate(texts)}
    moved = sum(read.values())
    moved += sum(_bytes(text) / (parts[in_place[n]] if n in in_place else 1) for n, text in enumerate(made))
    if target == "__cublas":
        contracted = re.findall(r'"lhs_contracting_dimensions":\[([^\]]*)\]', i.line)[0]
        return Kernel(PRODUCTS, _product(i.result, texts[0], re.findall(r"\d+", contracted)), moved, 1)
    if "/cache_write/" in i.line:  # a few vectors of what it writes in place; on a TPU the columns around them
        given = (_bytes(text) for n, text in enumerate(texts) if n not in in_place.values())
        columns = re.search(r'"cost_estimate":\{[^}]*"bytes_accessed":"(\d+)"', i.line)
        return Kernel(OTHER, 0.0, float(columns[1]) if columns else 2 * sum(given), 1)
    seen = 1.0 if ALL_PAIRS in i.line else seen
    arrays = [_shape(text) for text in texts if re.match(r"(b?f\d|s8)", text)]
    stated = re.search(r'"cost_estimate":\{[^}]*"flops":"(\d+)"', i.line)  # on TPUs
    if "/products/" in i.line:
        return Kernel(PRODUCTS, 2.0 * math.prod(arrays[0]) * sum(_shape(text)[1] for text in made), moved, 1)
    if target == "__cudnn$fmha":
        size = re.findall(r'"intermediate_tensor_shape":\{[^}]*"dimensions":\[([^\]]*)\]', i.line)[0]
        backward = "Backward" in i.line
        pairs, width = math.prod(map(int, re.findall(r"\d+", size))), arrays[0][-1]
        flops = 2 * (5 if backward else 2) * pairs * width * seen
        return Kernel(BACKWARD if backward else FORWARD, flops, moved, 1, ATTENTION["cudnn"][backward])
    name = re.search(r"/(attention|ragged_dot|matmul|delta_rule)_(\w+)/", i.line)
    match name.groups() if name else ():
        case "attention", pass_:
            by_width, by_values = WIDTHS[pass_]
            (batch, seq, heads, width), (_, kv_seq, *_), (*_, values) = arrays[:3] if not stated else [(0,) * 4] * 3
            flops = 2.0 * batch * seq * heads * kv_seq * (by_width * width + by_values * values)
            backward = pass_ != "forward"
            flops = seen * (float(stated[1]) if stated else flops)
            return Kernel(BACKWARD if backward else FORWARD, flops, moved, 1, ATTENTION[target][backward])
        case "ragged_dot", pass_:
            moved -= (1 - filled) * sum(_bytes(text) for text in texts if len(_shape(text)) == 2)  # are not read
            (rows, outs), *others = (each for each in arrays if len(each) == 2)
            terms = rows * outs * (others[0][1] if pass_ in ("dw", "tn") else _shape(i.result)[1])
            return Kernel(GROUPED, 2.0 * filled * terms, moved, 1, EXPERTS[target])
        case "delta_rule", pass_ if pass_.startswith("fused_"):
            (*_, dim), (batch, heads, seq) = arrays[0], next(each for each in arrays if len(each) == 3)
            *additive, kernel = pass_.split("_")[1:]
            products = fused_products(kernel, dim, arrays[-1][-1], erase=not additive)
            return Kernel(RECURRENCE, 2.0 * batch * heads * seq * products, moved, 1)
        case "delta_rule", pass_ if pass_.startswith("channels_"):
            (*_, dim), (batch, heads, seq) = arrays[0], next(each for each in arrays if len(each) == 3)
            products = channel_products(pass_.removeprefix("channels_"), dim, arrays[-1][-1])
            return Kernel(RECURRENCE, 2.0 * batch * heads * seq * products, moved, 1)
        case "delta_rule", _:  # limited by memory, so that the lower rate of TF32 does not matter
            matrices, (*_, v_wide, _) = arrays[1:-2], arrays[-1]  # arrays[-2]: the decay of states
            return Kernel(RECURRENCE, float(stated[1] if stated else scan_flops(matrices, v_wide)), moved, 1)
        case "matmul", _:
            inner = next(each[-1] for each in arrays if len(each) == 2)
            return Kernel(PRODUCTS, 2.0 * math.prod(_shape(i.result)) * inner, moved, 1)
    return Kernel(FORWARD if "/decode_attention/" in i.line else OTHER, 0.0, moved, 1)
