"""A small GRPO run, twice from the same weights and seed: eager, and through ``backend="inductor_grpo"``.

    python -m inductor_grpo.tools.demo [--steps 24] [--seed 0] [--device cpu] [--backend inductor_grpo] [--json]

Task: eight numbers are given, the model answers with their running totals (``3 5 1 ... -> 3 8 9 ...``), each number
one token.  The checker ends an answer at its first wrong total; the reward is the share of right totals.  A short
supervised warm-up gives both runs the same starting point.  Each run has a process of its own, so that peak memory is
its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUMBERS = 8  # how many are given, and how many totals are answered
CLIP = 0.2
TOLERANCE = 1e-2  # for losses; far above rounding, for one token sampled otherwise changes all that follows
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Setup:
    """Everything a run depends on.

    ``vocab`` exceeds what the task needs, so that the head weighs as much as in a real model.
    """

    steps: int = 24
    seed: int = 0
    device: str = "cpu"
    backend: str = "inductor_grpo"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    vocab: int = 8192
    hidden: int = 128
    layers: int = 2
    prompts: int = 64
    group: int = 8
    updates: int = 2  # optimizer updates for each batch of rollouts
    warmup: int = 100
    warmup_batch: int = 128
    lr: float = 5e-4

    @property
    def tokens(self) -> int:
        """Answer tokens in one batch: the rows of the logits."""
        return self.prompts * self.group * NUMBERS

    @property
    def separator(self) -> int:
        """The token between the numbers and the totals; all others are the numbers 0, 1, 2, ..."""
        return self.vocab - 1


# ------------------------------------------------------------------------------------------------------------ the model


class Block(nn.Module):
    """Attention and MLP, pre-norm, causal."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        b, t, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, h // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, h))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


class Model(nn.Module):
    """A decoder-only transformer: ``features`` gives hidden ``[B, T, H]``, ``lm_head`` the logits ``[B, T, V]``."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.embed = nn.Embedding(setup.vocab, setup.hidden)
        self.position = nn.Embedding(2 * NUMBERS + 1, setup.hidden)
        self.blocks = nn.ModuleList([Block(setup.hidden, heads=4) for _ in range(setup.layers)])
        self.norm = nn.LayerNorm(setup.hidden)
        self.lm_head = nn.Linear(setup.hidden, setup.vocab, bias=False)

    def features(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        normed: Tensor = self.norm(x)
        return normed


# ------------------------------------------------------------------------------------------------------ what is trained


def grpo_loss(model: Model, tokens: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """The clipped token-level GRPO loss, written naively: this is the function that is compiled.

    tokens ``[B, 2 * NUMBERS + 1]``, old_logp and mask ``[B, NUMBERS]``, advantages ``[B]``; returns a scalar.
    """
    hidden = model.features(tokens[:, :-1])[:, NUMBERS:]
    logits = model.lm_head(hidden).float()
    targets = tokens[:, NUMBERS + 1 :]
    logp = F.log_softmax(logits, dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    ratio = torch.exp(logp - old_logp)
    advantages = advantages.unsqueeze(-1)
    per_token = -torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return (per_token * mask).sum() / mask.sum()


def problems(setup: Setup, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Prompts ``[count, NUMBERS + 1]`` (numbers from 1 to 9 and a separator) and their totals ``[count, NUMBERS]``."""
    numbers = torch.randint(1, 10, (count, NUMBERS), generator=generator)
    separator = torch.full((count, 1), setup.separator)
    return torch.cat([numbers, separator], 1).to(setup.device), numbers.cumsum(1).to(setup.device)


@torch.no_grad()
def rollout(model: Model, prompts: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Samples answers at temperature 1: tokens ``[B, 2 * NUMBERS + 1]`` and the log-probs ``[B, NUMBERS]`` they had.

    The largest of probability / exponential noise is a sample, and one that rounding hardly ever tips: models that are
    equal up to rounding, given equal generators, sample the same tokens.
    """
    tokens, logps, apart = prompts, [], 128
    # All positions read one table of noise, each from its own start: the few numbers that matter never share an entry.
    vocab = model.lm_head.out_features
    noise = torch.empty(len(prompts), vocab + apart * NUMBERS).exponential_(generator=generator).to(prompts.device)
    for position in range(NUMBERS):
        logp = F.log_softmax(model.lm_head(model.features(tokens)[:, -1]), dim=-1)
        window = noise[:, position * apart : position * apart + vocab]
        choice = (logp - window.log()).argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, choice], 1)
        logps.append(logp.gather(1, choice))
    return tokens, torch.cat(logps, 1)


def check(tokens: Tensor, totals: Tensor) -> tuple[Tensor, Tensor]:
    """Reward ``[B]``: the share of totals before the first wrong one; mask ``[B, NUMBERS]``: up to that one."""
    right = (tokens[:, NUMBERS + 1 :] == totals).float().cumprod(1)
    mask = torch.cat([torch.ones_like(right[:, :1]), right[:, :-1]], 1)
    return right.mean(1), mask


def group_advantages(rewards: Tensor, group: int) -> Tensor:
    """Rewards ``[B]`` normalised within each group of answers to the same prompt."""
    grouped = rewards.view(-1, group)
    return ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)).flatten()


def warm_up(setup: Setup) -> dict[str, Tensor]:
    """A short supervised training on right answers, which leaves much to improve; returns the weights."""
    torch.manual_seed(setup.seed)
    model = Model(setup).to(setup.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(setup.seed)
    for _ in range(setup.warmup):
        prompts, totals = problems(setup, setup.warmup_batch, generator)
        hidden = model.features(torch.cat([prompts, totals[:, :-1]], 1))[:, NUMBERS:]
        loss = F.cross_entropy(model.lm_head(hidden).flatten(0, 1), totals.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.state_dict()


# ------------------------------------------------------------------------------------------ one run, in its own process


def train(setup: Setup, weights: dict[str, Tensor], compiled: bool) -> Iterator[dict[str, Any]]:
    """Yields one record for each step and a last one with what was measured."""
    model = Model(setup).to(setup.device)
    model.load_state_dict(weights)
    # Adam divides by the gradient's size: with a smaller eps, gradients that are only rounding noise become full steps.
    optimizer = torch.optim.Adam(model.parameters(), lr=setup.lr, eps=1e-6)
    loss_fn: Callable[..., Tensor] = grpo_loss
    if compiled:
        loss_fn = torch.compile(grpo_loss, backend=setup.backend, options=setup.options or None)
    first_call = 0.0
    steps: list[float] = []
    losses: list[float] = []
    for step in range(setup.steps):
        generator = torch.Generator().manual_seed(setup.seed * 1_000_003 + step + 1)
        prompts, totals = (x.repeat_interleave(setup.group, 0) for x in problems(setup, setup.prompts, generator))
        tokens, old_logp = rollout(model, prompts, generator)
        rewards, mask = check(tokens, totals)
        batch = (tokens, old_logp, group_advantages(rewards, setup.group), mask)
        losses.clear()
        times = []
        for _ in range(setup.updates):
            start = time.perf_counter()
            loss = loss_fn(model, *batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())  # also waits for the device
            times.append(time.perf_counter() - start)
        first_call = first_call or times[0]
        steps += times
        digest = hashlib.sha256(repr(tokens.tolist()).encode()).hexdigest()
        yield {"step": step, "loss": statistics.fmean(losses), "reward": rewards.mean().item(), "rollouts": digest}
        if step == 0:
            forget_peak(setup.device)
    median = statistics.median(steps[1:] or steps)
    memory = peak_memory(setup.device)
    # Last, and without an update: the profiler itself needs time and memory.
    largest, together = allocations(lambda: loss_fn(model, *batch).backward())
    result = {"update_seconds": median, "first_update_seconds": first_call, "largest_allocation": largest}
    yield {**result, "allocated_peak": together, **memory, **rewrites(compiled and setup.backend == "inductor_grpo")}


def rewrites(ours: bool) -> dict[str, Any]:
    """What the backend says that it did to the last compiled function."""
    if not ours:
        return {}
    import inductor_grpo

    report = inductor_grpo.last_report()
    return {"report": json.loads(report.to_json()), "report_text": str(report)} if report is not None else {}


def allocations(step: Callable[[], object]) -> tuple[int, int]:
    """The largest single allocation of ``step`` and the most it held at once above where it began, in bytes.

    The allocator itself reports to the profiler, so compiled code is measured just as eager code is.
    """
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    events.sort(key=lambda e: e["ts"])
    held = most = 0
    for event in events:
        held += event["args"]["Bytes"]
        most = max(most, held)
    return max((e["args"]["Bytes"] for e in events), default=0), most


def forget_peak(device: str) -> None:
    """Starts the measurement of the peak anew, after the first step and with it the compilation."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass  # not Linux, or not allowed: the peak then includes the compiler


def peak_memory(device: str) -> dict[str, int]:
    """Peaks in bytes: the resident set of this process and, on a GPU, what was allocated there."""
    unit = 1 if sys.platform == "darwin" else 1024
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:  # on Linux ru_maxrss begins with what the parent had; this does not
        status = Path("/proc/self/status").read_text()
        resident = int(status.split("VmHWM:")[1].split()[0])
    except (OSError, IndexError):
        pass
    peaks = {"peak_resident": resident * unit}
    if device.startswith("cuda"):
        peaks["peak_device"] = torch.cuda.max_memory_allocated(device)
    return peaks


# ---------------------------------------------------------------------------------------------- both runs, and the text


def run(setup: Setup, weights: Path, compiled: bool, show: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    """Runs :func:`train` in a new process, shows each record as it comes and returns all of them."""
    command = [sys.executable, "-c", "from inductor_grpo.tools import demo; demo.worker()"]
    task = json.dumps({"setup": dataclasses.asdict(setup), "weights": str(weights), "compiled": compiled})
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(p or os.getcwd() for p in sys.path))
    records = []
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen([*command, task], stdout=subprocess.PIPE, stderr=errors, text=True, env=env)
        assert process.stdout is not None
        with process:
            for line in process.stdout:
                if line.startswith("{"):
                    records.append(json.loads(line))
                    show(records[-1])
        if process.returncode:
            errors.seek(0)
            raise SystemExit(f"the {'compiled' if compiled else 'eager'} run failed:\n{errors.read()}")
    return records


def worker() -> None:
    """The child's side of :func:`run`: one JSON object a line on standard output."""
    task = json.loads(sys.argv[1])
    setup = Setup(**task["setup"])
    weights = torch.load(task["weights"], map_location=setup.device)
    for record in train(setup, weights, task["compiled"]):
        print(json.dumps(record), flush=True)


def summarise(setup: Setup, eager: list[dict[str, Any]], ours: list[dict[str, Any]]) -> dict[str, Any]:
    """Both runs as data: what ``--json`` prints and the summary shows."""
    pairs = list(zip(eager[:-1], ours[:-1], strict=True))
    keep = ("step", "loss", "reward")
    return {
        "setup": dataclasses.asdict(setup),
        "logits": [setup.tokens, setup.vocab],
        "logits_bytes": setup.tokens * setup.vocab * 4,
        "largest_loss_difference": max(abs(a["loss"] - b["loss"]) for a, b in pairs),
        "same_rollouts": sum(a["rollouts"] == b["rollouts"] for a, b in pairs),
        "eager": {**eager[-1], "steps": [{k: r[k] for k in keep} for r in eager[:-1]]},
        "compiled": {**ours[-1], "steps": [{k: r[k] for k in keep} for r in ours[:-1]]},
    }


def reward_ends(steps: list[dict[str, Any]]) -> str:
    """The mean reward of the first and of the last five steps (or fewer)."""
    few = min(5, (len(steps) + 1) // 2)
    first, last = (statistics.fmean(s["reward"] for s in part) for part in (steps[:few], steps[-few:]))
    return f"{first:.3f} -> {last:.3f}"


def summary(data: dict[str, Any]) -> str:
    """The summary as text."""
    eager, ours, setup = data["eager"], data["compiled"], data["setup"]

    def mib(key: str) -> tuple[str, str, str]:
        return f"{eager[key] / MIB:.1f} MiB", f"{ours[key] / MIB:.1f} MiB", f"{ours[key] / eager[key]:.2f}x"

    rows = [
        ("", "eager", setup["backend"], "ratio"),
        ("reward, first -> last steps", reward_ends(eager["steps"]), reward_ends(ours["steps"]), ""),
        ("largest tensor of an update", *mib("largest_allocation")),
        ("tensor memory of an update, peak", *mib("allocated_peak")),
        ("resident memory of the process, peak", *mib("peak_resident")),
    ]
    if "peak_device" in eager:
        rows.append(("device memory, peak", *mib("peak_device")))
    times = eager["update_seconds"], ours["update_seconds"]
    rows.append(("time of an update, median", f"{times[0]:.3f} s", f"{times[1]:.3f} s", f"{times[1] / times[0]:.2f}x"))
    firsts = eager["first_update_seconds"], ours["first_update_seconds"]
    rows.append(("first update (compiles)", f"{firsts[0]:.1f} s", f"{firsts[1]:.1f} s", ""))
    lines = ["| {:36} | {:>16} | {:>16} | {:>6} |".format(*row) for row in rows]
    lines.insert(1, "|" + "|".join("-" * (n + 2) for n in (36, 16, 16, 6)) + "|")
    gone = ours["largest_allocation"] < data["logits_bytes"]
    n, v = data["logits"]
    lines += [
        "",
        f"largest difference of the loss: {data['largest_loss_difference']:.1e}; "
        f"the same tokens were sampled in {data['same_rollouts']} of {len(eager['steps'])} steps",
        f"logits [{n}, {v}] in float32 take {data['logits_bytes'] / MIB:.0f} MiB: "
        + ("no tensor of that size exists in the compiled run" if gone else "STILL THERE in the compiled run"),
    ]
    if "report_text" in ours:
        lines += ["", "what was rewritten:", ours["report_text"]]
    return "\n".join(lines)


def arguments(argv: list[str] | None) -> tuple[Setup, bool]:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="inductor_grpo.tools.demo", description=(__doc__ or "").splitlines()[0])
    sizes = ("steps", "seed", "vocab", "prompts", "group", "warmup")
    for name in sizes:
        parser.add_argument(f"--{name}", type=int, default=getattr(Setup, name), help="default: %(default)s")
    parser.add_argument("--device", default=Setup.device, help="cpu or cuda; default: %(default)s")
    parser.add_argument("--backend", default=Setup.backend, help="of the second run; default: %(default)s")
    of_compile = "an option of torch.compile, such as grpo.require=true; may be repeated"
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help=of_compile)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    given = parser.parse_args(argv)
    options = {}
    for item in given.option:
        key, _, value = item.partition("=")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    chosen = {name: getattr(given, name) for name in (*sizes, "device", "backend")}
    if chosen["steps"] < 1:
        parser.error("--steps must be at least 1")
    return Setup(**chosen, options=options), given.json


def main(argv: list[str] | None = None) -> int:
    """Runs both and prints; returns 1 if our backend left a tensor of the size of the logits or gave other losses."""
    setup, as_json = arguments(argv)
    say: Callable[[str], None] = (lambda text: None) if as_json else (lambda text: print(text, flush=True))
    say(
        f"{setup.prompts} prompts x {setup.group} answers x {NUMBERS} tokens, vocabulary {setup.vocab}, "
        f"{setup.updates} updates a step, {setup.device}, torch {torch.__version__}\n"
        f"warm-up: {setup.warmup} supervised steps; then eager:"
    )
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights.pt"
        torch.save(warm_up(setup), weights)

        def show_eager(record: dict[str, Any]) -> None:
            if "step" in record:
                say(f"  {record['step']:3}  loss {record['loss']:+.6f}  reward {record['reward']:.3f}")

        eager = run(setup, weights, False, show_eager)
        say(f'\nthe same with torch.compile(grpo_loss, backend="{setup.backend}"):')
        say("step   loss: eager, compiled, difference     reward: eager, compiled")

        def show_both(record: dict[str, Any]) -> None:
            if "step" in record:
                a, b = eager[record["step"]], record
                losses = f"{a['loss']:+.6f} {b['loss']:+.6f}  {abs(a['loss'] - b['loss']):.1e}"
                say(f"{b['step']:4}   {losses}            {a['reward']:.3f} {b['reward']:.3f}")

        ours = run(setup, weights, True, show_both)
    data = summarise(setup, eager, ours)
    print(json.dumps(data) if as_json else "\n" + summary(data))
    left = data["compiled"]["largest_allocation"] >= data["logits_bytes"]
    return int(setup.backend == "inductor_grpo" and (left or not data["largest_loss_difference"] < TOLERANCE))


if __name__ == "__main__":
    sys.exit(main())
