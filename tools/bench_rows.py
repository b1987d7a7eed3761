"""Time and peak memory of ``inductor_grpo::rows`` against the matmuls it cannot avoid.

    python -m inductor_grpo.tools.bench_rows --device cuda --shape 8192,4096,151936 --chunk-mib 0,256,640,1280

The work is a training step on the head: selected log-probability forward, then the gradients of hidden and weight.
*floor* is its three matmuls alone (logits, dX, dW); the op runs four, since its backward recomputes the logits.
Peak is above the inputs.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import time
from collections.abc import Callable
from typing import Any

import torch

import inductor_grpo.ops  # noqa: F401  (registers the op)
from inductor_grpo import body as bodies
from inductor_grpo.program import Program, Projection, Sink

FORWARD = """def body(n, logits, rows, whole, syms):
    v0 = torch.ops.prims.convert_element_type.default(logits[0], torch.float32)
    v1 = torch.ops.aten.amax.default(v0, [1], True)
    v2 = torch.ops.aten.sub.Tensor(v0, v1)
    v3 = torch.ops.aten.exp.default(v2)
    v4 = torch.ops.aten.sum.dim_IntList(v3, [1], True)
    v5 = torch.ops.aten.log.default(v4)
    v6 = torch.ops.aten.sub.Tensor(v2, v5)
    v7 = torch.ops.aten.gather.default(v6, 1, rows[1])
    v8 = torch.ops.aten.add.Tensor(v1, v5)
    return (v7, v8)
"""
BACKWARD = """def body(n, logits, rows, whole, syms):
    v0 = torch.ops.prims.convert_element_type.default(logits[0], torch.float32)
    v1 = torch.ops.aten.sub.Tensor(v0, rows[2])
    v2 = torch.ops.aten.exp.default(v1)
    v3 = torch.ops.prims.iota.default(
        syms[0], start=0, step=1, dtype=torch.int64, device=rows[1].device, requires_grad=False)
    v4 = torch.ops.aten.eq.Tensor(torch.ops.aten.unsqueeze.default(v3, 0), rows[1])
    v5 = torch.ops.prims.convert_element_type.default(v4, torch.float32)
    v6 = torch.ops.aten.sub.Tensor(v5, v2)
    v7 = torch.ops.aten.mul.Tensor(v6, rows[3])
    v8 = torch.ops.prims.convert_element_type.default(v7, torch.{dtype})
    return (v8,)
"""


def programs(dtype: str, accumulate: str) -> tuple[str, str]:
    """Texts of the forward and the backward program."""
    head = (Projection(0, 0),)
    forward = Program(head, FORWARD, (Sink("row", 0, None, 1, "float32"), Sink("row", 1, None, 1, "float32")))
    sinks = (Sink("contract", 0, 1, "s0", dtype), Sink("outer", 0, 0, "s0", dtype, accumulate))
    return forward.to_text(), Program(head, BACKWARD.replace("{dtype}", dtype), sinks).to_text()


class Bench:
    """Times functions of one device.

    On the CPU: processor time on one thread, which other load on the machine moves little; peak is the growth of the
    resident set's maximum.  On CUDA: events, and peak device memory.
    """

    def __init__(self, device: str, repeats: int):
        self.device, self.repeats = device, repeats

    def __call__(self, fn: Callable[[], Any]) -> tuple[float, float]:
        for _ in range(2 if self.device == "cuda" else 1):
            fn()
        gc.collect()
        times = []
        if self.device != "cuda":
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for _ in range(self.repeats):
                start = time.process_time()
                fn()
                times.append((time.process_time() - start) * 1e3)
            return min(times), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for _ in range(self.repeats):
            start_, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start_.record()
            fn()
            stop.record()
            torch.cuda.synchronize()
            times.append(start_.elapsed_time(stop))
        return sorted(times)[len(times) // 2], (torch.cuda.max_memory_allocated() - before) / 2**20


def eager_step(x: torch.Tensor, w: torch.Tensor, labels: torch.Tensor, g: torch.Tensor) -> None:
    """The same step in eager mode."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    logp = torch.log_softmax((x @ w.t()).float(), -1).gather(1, labels)
    torch.autograd.grad(logp, (x, w), g)


def main() -> None:
    """Prints one line per case and a JSON line at the end; a case that fails prints its error and the others go on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--shape", default="2048,1024,32000", help="N,H,V")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--chunk-mib", default="0", help="sizes of one chunk buffer, 0 = the default; comma separated")
    parser.add_argument("--accumulate", default="float32", help="comma separated: float32, bfloat16")
    parser.add_argument("--codegen", default="inductor", help="comma separated: inductor, eager")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--eager", action="store_true", help="time eager mode too")
    parser.add_argument("--profile", action="store_true", help="kernel times of the last case (CUDA)")
    args = parser.parse_args()
    n, h, v = (int(part) for part in args.shape.split(","))
    dtype, device = getattr(torch, args.dtype), args.device
    torch.manual_seed(0)
    if device == "cpu":
        torch.set_num_threads(1)
    bench = Bench(device, args.repeats)
    x = torch.randn(n, h, device=device).to(dtype)
    w = (torch.randn(v, h, device=device) * h**-0.5).to(dtype)
    labels = torch.randint(0, v, (n, 1), device=device)
    g = torch.randn(n, 1, device=device) / n
    results: dict[str, Any] = {}

    def case(label: str, fn: Callable[[], Any]) -> float:
        try:
            ms, mib = bench(fn)
        except Exception as error:
            print(f"{label:44s} failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
            return float("nan")
        ratio = ms / results["floor"][0] if "floor" in results else 1.0
        results[label] = (round(ms, 3), round(mib), round(ratio, 3))
        print(f"{label:44s} {ms:9.2f} ms {ratio:6.2f}x floor  peak +{mib:7.0f} MiB", flush=True)
        return ms

    held = {
        "logits": torch.empty(n, v, device=device, dtype=dtype),
        "dx": torch.empty_like(x),
        "dw": torch.empty_like(w),
    }

    def floor() -> None:
        torch.mm(x, w.t(), out=held["logits"])
        torch.mm(held["logits"], w, out=held["dx"])
        torch.mm(held["logits"].t(), x, out=held["dw"])

    print(f"N={n} H={h} V={v} {args.dtype} {device} torch {torch.__version__}")
    case("floor", floor)
    case("one logits matmul", lambda: torch.mm(x, w.t(), out=held["logits"]))
    held.clear()
    if args.eager:
        case("eager", lambda: eager_step(x, w, labels, g))
    rows = torch.ops.inductor_grpo.rows
    last: Callable[[], Any] | None = None
    for accumulate in args.accumulate.split(","):
        ahead, back = programs(args.dtype, accumulate)
        for mode in args.codegen.split(","):
            for mib in args.chunk_mib.split(","):
                chunk = int(float(mib) * 2**20)

                def forward(chunk: int = chunk, mode: str = mode, text: str = ahead) -> list[torch.Tensor]:
                    return rows([x, labels], [w.t()], n, [v], text, chunk, mode)  # type: ignore[no-any-return]

                def step(
                    chunk: int = chunk,
                    mode: str = mode,
                    text: str = back,
                    forward: Callable[[], list[torch.Tensor]] = forward,
                ) -> list[torch.Tensor]:
                    _, lse = forward()
                    return rows([x, labels, lse, g], [w.t(), w], n, [v], text, chunk, mode)  # type: ignore[no-any-return]

                name = f"{mode} {accumulate} {mib} MiB"
                case(f"{name} forward", forward)
                case(f"{name} step", step)
                last = step
    fallen = sum(body.uncompiled for body in bodies.cached())
    print(f"bodies that fell back to eager: {fallen}")
    if args.profile and last is not None and device == "cuda":
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as prof:
            last()
            torch.cuda.synchronize()
        print(prof.key_averages().table(sort_by="cuda_time_total", row_limit=14, max_name_column_width=80))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
