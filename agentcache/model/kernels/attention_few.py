"""Attention products of few query rows over pages of 16-bit keys and values, compiled at run time. Knows nothing of models.

As linear_few.py for weights: keys and values are read once, in the type they are stored in, instead of being converted to fp32 page by
page, and accumulated in the order of the fp32 batched product that more rows take, which `numerics` finds out.

    scores[s, p, h, r, j] = chain over d of q[s, h, r, d] · K_sp[h, d, j]              sequences s, pages p, heads h, rows r, slots j
    out[s, h, r, c]       = 0 + chain + chain ...      each over a block of j of scores[s, p, h, r, j] · V_sp[h, j, c], pages in order

Sequences of one call have equally many pages; whoever decodes many of them groups them so.
"""

from __future__ import annotations

import ctypes
from functools import partial
from string import Template

import torch

from ...kv import PAGE_TOKENS
from .ir import splat
from .linear_few import ALONE, BINARY, MOST_ROWS, PASS, ROWS, kernels

WIDE = 16  # vectors accumulated at once
AHEAD = 16  # stored rows between the one that is used and the one that is asked for
_FIELDS = 9  # page addresses, x, out, heads, rows, inner, block, tasks, passes (64 bits each); mix: out has `inner` columns


def _loads(lanes: int, wide: int, element: str) -> list[str]:
    """IR that loads `wide` vectors of 16-bit numbers at %src and makes fp32 %c0.. of them."""
    floats, lines = f"<{lanes} x float>", []
    for u in range(wide):
        lines += [f"%cp{u} = getelementptr i16, ptr %src, i64 {u * lanes}", f"%cn{u} = load <{lanes} x i16>, ptr %cp{u}, align 2"]
        if element == "bfloat":
            lines += [
                f"%cz{u} = zext <{lanes} x i16> %cn{u} to <{lanes} x i32>",
                f"%cs{u} = shl <{lanes} x i32> %cz{u}, {splat(lanes, 'i32 16')}",
                f"%c{u} = bitcast <{lanes} x i32> %cs{u} to {floats}",
            ]
        else:
            lines += [f"%cb{u} = bitcast <{lanes} x i16> %cn{u} to <{lanes} x half>", f"%c{u} = fpext <{lanes} x half> %cb{u} to {floats}"]
    return lines


def _chain_step(lanes: int, rows: int, wide: int, element: str) -> list[str]:
    floats = f"<{lanes} x float>"
    ahead = []
    for i in range(max(1, lanes * wide * 2 // 64)):
        ahead += [f"%ah{i} = getelementptr i8, ptr %ahead, i64 {64 * i}", f"call void @llvm.prefetch.p0(ptr %ah{i}, i32 0, i32 3, i32 1)"]
    lines = [*ahead, *_loads(lanes, wide, element)]
    for m in range(rows):
        lines += [
            f"%qo{m} = mul i64 %xline, {m}",
            f"%qk{m} = add i64 %qo{m}, %k",
            f"%qp{m} = getelementptr float, ptr %xs, i64 %qk{m}",
            f"%qs{m} = load float, ptr %qp{m}, align 4",
            f"%qi{m} = insertelement {floats} poison, float %qs{m}, i32 0",
            f"%qv{m} = shufflevector {floats} %qi{m}, {floats} poison, <{lanes} x i32> zeroinitializer",
        ]
        for u in range(wide):
            at = f"{m}_{u}"
            lines.append(f"%n{at} = call {floats} @llvm.fma.v{lanes}f32({floats} %qv{m}, {floats} %c{u}, {floats} %acc{at})")
    return lines


_MODULE = Template("""
declare i32 @omp_get_thread_num()
declare i32 @omp_get_num_threads()
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare ${floats} @llvm.fma.v${lanes}f32(${floats}, ${floats}, ${floats})

define void @share(ptr %args) {
entry:
${fields}
  %pages = inttoptr i64 %pages_ to ptr
  %x = inttoptr i64 %x_ to ptr
  %out = inttoptr i64 %out_ to ptr
  %count = load i64, ptr %pages, align 8
  %tiles = udiv i64 ${columns}, ${span}
  %per = mul i64 %tiles, %heads
  %xline = add i64 ${depth}, 0
  %me32 = call i32 @omp_get_thread_num()
  %me = sext i32 %me32 to i64
  %team32 = call i32 @omp_get_num_threads()
  %team = sext i32 %team32 to i64
  %before = mul i64 %me, %tasks
  %from = udiv i64 %before, %team
  %next = add i64 %me, 1
  %behind = mul i64 %next, %tasks
  %to = udiv i64 %behind, %team
  %some = icmp ult i64 %from, %to
  br i1 %some, label %task, label %end
task:
  %t = phi i64 [ %from, %entry ], [ %tnext, %finished ]
  %p0 = udiv i64 %t, %per
  %rest = urem i64 %t, %per
  %h = udiv i64 %rest, %tiles
  %tile = urem i64 %rest, %tiles
  %first = mul i64 %tile, ${span}
  %headsize = mul i64 ${columns}, ${depth}
  %headoff = mul i64 %h, %headsize
  br label %pass
pass:
  %turn = phi i64 [ 0, %task ], [ %turnnext, %stored ]
  %done_ = mul i64 %turn, ${rows_of_pass}
  br label %page
page:
  %pi = phi i64 [ 0, %pass ], [ %pnext, %pageend ]
${totals}
  %pstart = mul i64 %p0, ${pages_of_task}
  %p = add i64 %pstart, %pi
  %sequence = udiv i64 %p, %count
  %pslot = add i64 %p, 1
  %pp = getelementptr i64, ptr %pages, i64 %pslot
  %paddr = load i64, ptr %pp, align 8
  %pbase = inttoptr i64 %paddr to ptr
  %hbase = getelementptr i16, ptr %pbase, i64 %headoff
  %xpage = mul i64 ${xpage_of}, %heads
  %xh = add i64 %xpage, %h
  %xa = mul i64 %xh, %rows
  %xr = add i64 %xa, %done_
  %xo = mul i64 %xr, %xline
  %xs = getelementptr float, ptr %x, i64 %xo
  br label %block_
block_:
  %kstart = phi i64 [ 0, %page ], [ %kend, %closed ]
${carried}
  %kraw = add i64 %kstart, %block
  %over = icmp ugt i64 %kraw, ${depth}
  %kend = select i1 %over, i64 ${depth}, i64 %kraw
  br label %step
step:
  %k = phi i64 [ %kstart, %block_ ], [ %knext, %step ]
${chains}
  %krow = mul i64 %k, ${columns}
  %kcol = add i64 %krow, %first
  %src = getelementptr i16, ptr %hbase, i64 %kcol
  %aheadcol = mul i64 ${columns}, ${ahead}
  %ahead = getelementptr i16, ptr %src, i64 %aheadcol
  ${steps}
  %knext = add i64 %k, 1
  %more = icmp ult i64 %knext, %kend
  br i1 %more, label %step, label %closed
closed:
${closes}
  %blocks = icmp ult i64 %kend, ${depth}
  br i1 %blocks, label %block_, label %pageend
pageend:
  %pnext = add i64 %pi, 1
  %pmore = icmp ult i64 %pnext, ${pages_of_task}
  br i1 %pmore, label %page, label %stored
stored:
  %ph = mul i64 %p0, %heads
  %oh = add i64 %ph, %h
  %oa = mul i64 %oh, %rows
  %orow = add i64 %oa, %done_
  %oo = mul i64 %orow, ${columns}
  %oc = add i64 %oo, %first
  %target = getelementptr float, ptr %out, i64 %oc
${stores}
  %turnnext = add i64 %turn, 1
  %turns = icmp ult i64 %turnnext, %passes
  br i1 %turns, label %pass, label %finished
finished:
  %tnext = add i64 %t, 1
  %tmore = icmp ult i64 %tnext, %to
  br i1 %tmore, label %task, label %end
end:
  ret void
}
""")


def _source(kind: str, lanes: int, rows: int, wide: int, element: str) -> str:
    """The module: `share` does the tasks of one thread.

    kind "scores": one task is some slots of one head of one page. kind "mix": some channels of one head, over all pages.
    """
    floats, span = f"<{lanes} x float>", lanes * wide
    cells = [f"{m}_{u}" for m in range(rows) for u in range(wide)]
    names = ("pages", "x", "out", "heads", "rows", "inner", "block", "tasks", "passes")
    fields = "\n".join(
        f"  %f_{name} = getelementptr i64, ptr %args, i64 {i}\n  %{name}{'_' if i < 3 else ''} = load i64, ptr %f_{name}, align 8"
        for i, name in enumerate(names)
    )
    slots = kind == "scores"
    columns = str(PAGE_TOKENS) if slots else "%inner"  # of a stored row, and of an output row
    depth = "%inner" if slots else str(PAGE_TOKENS)  # stored rows, which the chain runs over
    start = splat(lanes, "float -0.0") if slots else "zeroinitializer"
    pages_of_task = "%count" if not slots else "1"
    totals = "\n".join(f"  %sum{c} = phi {floats} [ {start}, %pass ], [ %tot{c}, %pageend ]" for c in cells)
    carried = "\n".join(f"  %tin{c} = phi {floats} [ %sum{c}, %page ], [ %tot{c}, %closed ]" for c in cells)
    chains = "\n".join(f"  %acc{c} = phi {floats} [ zeroinitializer, %block_ ], [ %n{c}, %step ]" for c in cells)
    closes = "\n".join(f"  %tot{c} = fadd {floats} %tin{c}, %n{c}" for c in cells)
    stores = "\n".join(
        f"  %so{m}_{u} = mul i64 {columns}, {m}\n  %sc{m}_{u} = add i64 %so{m}_{u}, {u * lanes}\n"
        f"  %sp{m}_{u} = getelementptr float, ptr %target, i64 %sc{m}_{u}\n  store {floats} %tot{m}_{u}, ptr %sp{m}_{u}, align 4"
        for m in range(rows)
        for u in range(wide)
    )
    steps = "\n  ".join(_chain_step(lanes, rows, wide, element))
    return _MODULE.substitute(
        floats=floats,
        lanes=lanes,
        fields=fields,
        columns=columns,
        span=span,
        depth=depth,
        totals=totals,
        xpage_of="%sequence" if slots else "%p",
        carried=carried,
        chains=chains,
        ahead=AHEAD,
        steps=steps,
        closes=closes,
        pages_of_task=pages_of_task,
        stores=stores,
        rows_of_pass=rows,
    )


def takes(rows: int, stored: torch.Tensor) -> bool:
    """Whether products with keys or values [kv_heads, .., ..] of this type can run here."""
    found = kernels() if rows <= MOST_ROWS and stored.dtype in BINARY else None
    return found is not None and stored.device.type == "cpu" and stored.shape[-1] % found.lanes == 0 and stored.shape[-2] % found.lanes == 0


def _run(kind: str, stored: list[torch.Tensor], sequences: int, x: torch.Tensor, out: torch.Tensor, inner: int, block: int) -> None:
    """x and out [.., rows, ..]: passes of 8 rows, then of what is left, whose first row is addressed and whose other rows follow."""
    found = kernels()
    assert found is not None
    heads, rows = stored[0].shape[0], x.shape[-2]
    pages = (ctypes.c_int64 * (len(stored) + 1))(len(stored) // sequences, *(tensor.data_ptr() for tensor in stored))
    columns = PAGE_TOKENS if kind == "scores" else inner
    threads = torch.get_num_threads() if len(stored) * heads * rows * inner * PAGE_TOKENS > ALONE else 1
    at = 0
    while at < rows:
        count = max(n for n in ROWS if n <= rows - at)
        passes = (rows - at) // count if count == PASS else 1
        wide = max(u for u in (1, 2, 4, 8) if u * count <= WIDE and columns % (u * found.lanes) == 0)
        element = BINARY[stored[0].dtype]
        share = found.compiled(f"{kind} {count} {wide} {element}", partial(_source, kind, found.lanes, count, wide, element))
        tasks = heads * (columns // (wide * found.lanes)) * (len(stored) if kind == "scores" else sequences)
        lines = x.shape[-1] * at * 4, out.shape[-1] * at * 4
        args = (ctypes.c_int64 * _FIELDS)(
            ctypes.addressof(pages), x.data_ptr() + lines[0], out.data_ptr() + lines[1], heads, rows, inner, block, tasks, passes
        )
        found.team(share, args, threads)
        at += passes * count


def scores(q: torch.Tensor, keys: list[torch.Tensor], out: torch.Tensor, block: int) -> None:
    """q [sequences, heads, rows, head_dim] fp32 times the keys [heads, head_dim, 512] of each page of its sequence, sequence after
    sequence, into out [sequences · pages, heads, rows, 512] fp32.
    """
    _run("scores", keys, q.shape[0], q.contiguous(), out, q.shape[-1], block)


def mix(weights: torch.Tensor, values: list[torch.Tensor], sequences: int, block: int) -> torch.Tensor:
    """weights [sequences · pages, heads, rows, 512] fp32 times each page's values [heads, 512, head_dim], summed over the pages of a
    sequence -> [sequences, heads, rows, head_dim] fp32.
    """
    heads, rows, dim = weights.shape[1], weights.shape[2], values[0].shape[-1]
    out = torch.empty(sequences, heads, rows, dim)
    _run("mix", values, sequences, weights, out, dim, block)
    return out
