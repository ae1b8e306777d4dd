"""The opponents in torch: SDPA with cuDNN and FlashAttention, FlexAttention (Triton), grouped and 8-bit products, and
the recurrences of flash-linear-attention and mamba_ssm.

They are timed between two device events, over as many calls as `in_jax` queues. Their results are compared with float32
on a part of the data, to make sure that they do the same work.
"""

# pyright: reportPrivateImportUsage=false

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.cases import Attention, Case, Decode, DeltaRule, Dense, Experts, Grouped, Quantized
from benchmarks.gpu import regions


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = {"torch cudnn": SDPBackend.CUDNN_ATTENTION, "torch flash": SDPBackend.FLASH_ATTENTION}
Pass = tuple[Callable[[], Any], float]  # a function, and the relative error of its result


def measure(case: Case, name: str, which: str, *, seconds: float, count: int) -> dict[str, Any]:
    """Returns "ms" of a call (a list) and "error" of one pass, like `in_jax.measure`."""
    torch.manual_seed(time.time_ns() % 2**32)
    calls = [BUILDERS[type(case)](case, name, which) for _ in range(case.sets)]
    times = regions(functools.partial(_queue, lambda: [call() for call, _ in calls]), seconds=seconds, count=count)
    error = calls[0][1]
    calls.clear()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()  # JAX's process shares the card
    return {"ms": [ms / case.sets for ms in times], "error": error}


def _queue(launch: Callable[[], Any], calls: int) -> float:
    if DEVICE == "cpu":
        begin = time.perf_counter()
        for _ in range(calls):
            launch()
        return time.perf_counter() - begin
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(calls):
        launch()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def dense(case: Dense, name: str, which: str) -> Pass:
    x, y = _normal(case.size, case.size), _normal(case.size, case.size)
    return lambda: x @ y, _error([(x @ y)[-64:]], [x[-64:].float() @ y.float()])


def attention(case: Attention, name: str, which: str) -> Pass:
    c = case
    sides = (c.heads, c.dim), (c.kv_heads, c.dim), (c.kv_heads, c.v_dim), (c.heads, c.v_dim)
    q, k, v, d_out = (_normal(c.batch, c.seq, *side).transpose(1, 2) for side in sides)
    options: dict[str, Any] = dict(scale=c.dim**-0.5, enable_gqa=c.heads != c.kv_heads)

    def sdpa(backend: SDPBackend, q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel([backend]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=c.causal, **options)

    function, plain = (
        functools.partial(sdpa, backend) for backend in (BACKENDS.get(name, SDPBackend.MATH), SDPBackend.MATH)
    )
    if name == "torch flex":
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        def seen(batch: Any, head: Any, i: Any, j: Any) -> Any:
            lengths = [length for length in (c.chunk, c.documents and c.seq // c.documents) if length]
            of = [i >= j, *([i - j < c.window] if c.window else []), *(i // n == j // n for n in lengths)]
            return functools.reduce(torch.logical_and, of)

        if c.softcap:
            options["score_mod"] = lambda score, *_: c.softcap * torch.tanh(score / c.softcap)
        options["block_mask"] = create_block_mask(seen, None, None, c.seq, c.seq, device=DEVICE)
        plain = functools.partial(flex_attention, **options)
        torch.compiler.reset()  # programs of other cases count, and beyond 8 torch would run uncompiled
        function = torch.compile(plain, dynamic=False) if DEVICE == "cuda" else plain

    group = c.heads // c.kv_heads  # the checked part is the last sequence and key/value head
    part = [x[-1:, -n:].float() for x, n in ((q, group), (k, 1), (v, 1), (d_out, group))]
    if which == "forward":
        return lambda: function(q, k, v), _error([function(q, k, v)[-1:, -group:]], [plain(*part[:3])])

    def gradients(function: Callable[..., Any], q: Any, k: Any, v: Any, d_out: Any) -> Callable[[], Any]:
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = function(*leaves)
        return lambda: torch.autograd.grad(out, leaves, d_out, retain_graph=True)

    backward = gradients(function, q, k, v, d_out)
    ours = [x[-1:, -n:] for x, n in zip(backward(), (group, 1, 1), strict=True)]
    return backward, _error(ours, gradients(plain, *part)())


def decode(case: Decode, name: str, which: str) -> Pass:
    c = case
    q = _normal(c.batch, c.heads, 1, c.dim)
    k, v = (_normal(c.batch, c.kv_seq, c.kv_heads, c.dim).transpose(1, 2) for _ in range(2))
    lengths = torch.from_numpy(c.lengths()).to(DEVICE)
    seen = (torch.arange(c.kv_seq, device=DEVICE) < lengths[:, None])[:, None, None] if c.ragged else None

    def sdpa(q: Any, k: Any, v: Any, seen: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=c.dim**-0.5, enable_gqa=True)

    group = c.heads // c.kv_heads
    true = sdpa(q[-1:, -group:].float(), k[-1:, -1:].float(), v[-1:, -1:].float(), None if seen is None else seen[-1:])
    return lambda: sdpa(q, k, v, seen), _error([sdpa(q, k, v, seen)[-1:, -group:]], [true])


def grouped(case: Grouped, name: str, which: str) -> Pass:
    c, (rows, group), offsets = case, *_last_group(case)
    if c.int8:
        raise NotImplementedError("torch's grouped_mm has no int8")
    x, d_out = _normal(c.rows, c.ins), _normal(c.rows, c.outs)
    w = _normal(c.groups, c.outs, c.ins) * c.ins**-0.5
    a, b = {"forward": (x, w.mT), "dx": (d_out, w), "dw": (d_out.mT, x)}[which]
    call = lambda: _grouped_mm(a, b, offs=offsets)
    if which == "dw":
        return call, _error([call()[group]], [a[:, rows].float() @ b[rows].float()])
    return call, _error([call()[rows]], [a[rows].float() @ b[group].float()])


def experts(case: Experts, name: str, which: str) -> Pass:
    c, (rows, group), offsets = case, *_last_group(case)
    x, d_out = _normal(c.rows, c.ins), _normal(c.rows, c.ins)
    shapes = (c.outs, c.ins), (c.outs, c.ins), (c.ins, c.outs)
    leaves = [x, *(_normal(c.groups, *shape) * shape[1] ** -0.5 for shape in shapes)]

    def gradients(dot: Callable[..., Any], leaves: list[Any], d_out: Any) -> Any:
        x, gate, up, down = (leaf.requires_grad_() for leaf in leaves)
        return torch.autograd.grad(dot(F.silu(dot(x, gate)) * dot(x, up), down), leaves, d_out)

    call = lambda: gradients(lambda x, w: _grouped_mm(x, w.mT, offs=offsets), leaves, d_out)
    out = call()
    part = [leaves[0][rows].detach().float(), *(w[group].detach().float() for w in leaves[1:])]
    true = gradients(lambda x, w: x @ w.mT, part, d_out[rows].float())
    return call, _error([out[0][rows], *(dw[group] for dw in out[1:])], true)


def quantized(case: Quantized, name: str, which: str) -> Pass:
    """Computes the product alone; its arguments are quantised before."""
    c, fp8 = case, case.dtype == "fp8"
    largest, dtype = (448, torch.float8_e4m3fn) if fp8 else (127, torch.int8)

    def quantize(x: Any, block: tuple[int, int]) -> tuple[Any, Any]:
        cut = x.float().unflatten(0, (-1, block[0])).unflatten(2, (-1, block[1]))
        scale = cut.abs().amax((1, 3)) / largest
        values = cut / scale[:, None, :, None]
        return (values if fp8 else values.round()).flatten(2).flatten(0, 1).to(dtype), scale

    def meant(values: Any, scale: Any, block: tuple[int, int]) -> Any:
        return values.float() * scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)

    x_block, w_block = {
        "tensor": ((c.rows, c.ins), (c.outs, c.ins)),
        "channel": ((1, c.ins), (1, c.ins)),
        "block": ((1, 128), (128, 128)),
    }[c.granularity]
    x8, x_scale = quantize(_normal(c.rows, c.ins), x_block)
    w8, w_scale = quantize(_normal(c.outs, c.ins) * c.ins**-0.5, w_block)
    true = meant(x8, x_scale, x_block) @ meant(w8, w_scale, w_block).mT
    if not fp8:
        if c.granularity == "block":
            raise NotImplementedError("torch has no int8 product by blocks")
        out = torch._int_mm(x8, w8.mT).float() * x_scale * w_scale.mT
        return lambda: torch._int_mm(x8, w8.mT), _error([out], [true])
    if c.granularity == "block":
        x_scale = x_scale.mT.contiguous().mT  # cuBLASLt needs this layout of the scales
    options = dict(scale_a=x_scale, scale_b=w_scale.mT, out_dtype=torch.bfloat16)
    call = lambda: torch._scaled_mm(x8, w8.mT, **options)
    return call, _error([call()], [true])


def delta_rule(case: DeltaRule, name: str, which: str) -> Pass:
    c, first, group = case, 512, case.v_heads // case.heads
    if c.erase:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.kda import chunk_kda

        function = chunk_kda if c.by_channel else chunk_gated_delta_rule
        run = lambda q, k, v, decay, beta: function(q, k, v, decay, beta, scale=c.dim**-0.5)[0]
    else:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        run = lambda q, k, v, decay, beta: mamba_chunk_scan_combined(v, beta, decay, k, q, chunk_size=256)
    of_tokens = lambda *shape: torch.randn((c.batch, c.seq, *shape), device=DEVICE)
    q, k, v, d_out = (of_tokens(n, d) for n, d in ((c.heads, c.dim),) * 2 + ((c.v_heads, c.v_dim),) * 2)
    if c.erase:
        q, k, beta = F.normalize(q, dim=-1), F.normalize(k, dim=-1), of_tokens(c.v_heads).sigmoid()
        decay = F.logsigmoid(of_tokens(c.v_heads, *[c.dim] * c.by_channel)) / 16
    else:
        decay = -1.0 - torch.arange(c.v_heads, device=DEVICE) % 16
        beta = of_tokens(c.v_heads).sigmoid() / 10
    q, k, v, d_out = (x.bfloat16() for x in (q, k, v, d_out))

    def by_token(q: Any, k: Any, v: Any, decay: Any, beta: Any) -> Any:
        decay = decay if c.erase else decay * beta
        q, k, state, outs = q.repeat_interleave(group, 2), k.repeat_interleave(group, 2), 0.0, []
        for n in range(q.shape[1]):
            state = state * decay[:, n].exp().reshape(1, group, -1, 1)
            held = torch.einsum("bhdv,bhd->bhv", state, k[:, n]) if c.erase and n else 0.0
            written = beta[:, n, :, None] * (v[:, n] - held)
            state = state + k[:, n, :, :, None] * written[:, :, None]
            outs.append(torch.einsum("bhdv,bhd->bhv", state, q[:, n]))
        return torch.stack(outs, 1) * (c.dim**-0.5 if c.erase else 1.0)

    # For the first tokens of the last head, neither outputs nor the queries' gradients depend on later tokens.
    cut = lambda x, heads: x[-1:, :first, -heads:].float()
    part = [cut(q, 1), cut(k, 1), cut(v, group), cut(decay, group) if c.erase else decay[-group:], cut(beta, group)]
    if which == "forward":
        return lambda: run(q, k, v, decay, beta), _error([cut(run(q, k, v, decay, beta), group)], [by_token(*part)])

    def gradients(run: Callable[..., Any], d_out: Any, *arguments: Any) -> Callable[[], Any]:
        leaves = [x.detach().requires_grad_() for x in arguments]
        out = run(*leaves)
        return lambda: torch.autograd.grad(out, leaves, d_out, retain_graph=True)

    backward = gradients(run, d_out, q, k, v, decay, beta)
    return backward, _error([cut(backward()[0], 1)], gradients(by_token, cut(d_out, group), *part)()[:1])


BUILDERS: dict[type[Case], Callable[..., Pass]] = {
    Dense: dense, Attention: attention, Decode: decode, Grouped: grouped, Experts: experts, Quantized: quantized,
    DeltaRule: delta_rule,
}  # fmt: skip


def _grouped_mm(*arguments: Any, **options: Any) -> Any:
    """Calls grouped_mm, which is public since torch 2.10."""
    return (getattr(F, "grouped_mm", None) or torch._grouped_mm)(*arguments, **options)


def _last_group(case: Grouped) -> tuple[tuple[slice, int], Any]:
    """Returns the rows of the last group that has any, with the group's number, and the ends of all groups."""
    ends = torch.from_numpy(case.group_sizes()).cumsum(0).to(torch.int32)
    group = int(torch.nonzero(torch.from_numpy(case.group_sizes()))[-1])
    return (slice(int(ends[group - 1]) if group else 0, int(ends[group])), group), ends.to(DEVICE)


def _normal(*shape: int) -> Any:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def _error(ours: Sequence[Any], true: Sequence[Any]) -> float:
    pairs = [(a.detach().float(), b.detach().float()) for a, b in zip(ours, true, strict=True)]
    return float(torch.stack([(a - b).norm() / b.norm() for a, b in pairs]).max())
