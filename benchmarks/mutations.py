"""Mutation study: whether tests notice a flipped sign or a dropped term in a policy part.

    python benchmarks/mutations.py [NAME...]

Each mutation replaces one text in one source file of a temporary copy of the checkout and runs the
tests of that part, stopping at the first failure. A mutation that no test notices is printed as
`survived`, and the exit code is 1. Sources that no longer have the text are an error: update the
list with the part.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPIED = ("src", "tests", "pyproject.toml", "examples", "docs", "studies", "benchmarks")


@dataclass(frozen=True)
class Mutation:
    """Replaced text of one part.

    Args:
        file: source file below `src/larder`.
        tests: test files below `tests`.
        chosen: `-k` expression; empty for all.
    """

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    chosen: str = ""


MARKS = "not gpu and not stress and not cluster"
SCORERS, BUDGETS = ("policy/test_scorers.py",), ("policy/test_budgets.py",)
MUTATIONS = {
    "ragboost: like positions are farther": Mutation(
        "session/context_tree.py",
        "longest + POSITION_WEIGHT * apart",
        "longest - POSITION_WEIGHT * apart",
        ("session/test_context_tree.py",),
    ),
    "ragboost: nearest lists in place of average linkage": Mutation(
        "session/context_tree.py",
        "row = (sizes[one] * near[one] + sizes[other] * near[other]) / (sizes[one] + sizes[other])",
        "row = np.minimum(near[one], near[other])",
        ("session/test_context_tree.py",),
    ),
    "ragboost: clusters forget what is around them": Mutation(
        "session/context_tree.py",
        "dict.fromkeys(merges[node - count], prefix)",
        "dict.fromkeys(merges[node - count], ())",
        ("session/test_context_tree.py",),
    ),
    "ragboost: texts alike become references": Mutation(
        "server/context_order.py",
        "self._texts.get(_opening(text)) == {text}",
        "text in self._texts.get(_opening(text), set())",
        ("server/test_context_order.py",),
    ),
    "lukv: flattest steps first": Mutation(
        "policy/budgets/lukv.py",
        "for slope in sorted(levels, reverse=True):",
        "for slope in sorted(levels):",
        ("policy/test_lukv.py",),
    ),
    "lukv: hull below the curve": Mutation(
        "policy/budgets/lukv.py",
        "_slope(corners[-1], corner) >= _slope(corners[-2], corners[-1])",
        "_slope(corners[-1], corner) <= _slope(corners[-2], corners[-1])",
        ("policy/test_lukv.py",),
    ),
    "utility: without lengths of values": Mutation(
        "models/measurements/utility.py",
        "return mass * inputs.values[:, : self.context].float().norm(dim=-1)",
        "return mass",
        ("models/test_measurements.py",),
        "utility",
    ),
    "kvgrad: without gradients": Mutation(
        "policy/scorers/kvgrad.py",
        "(weights * slopes[:, None]).amax(1)",
        "weights.amax(1)",
        SCORERS,
        "kvgrad",
    ),
    "kvgrad: without lengths of values": Mutation(
        "policy/scorers/kvgrad.py",
        "weights.isfinite(), weights * norms, weights",
        "weights.isfinite(), weights, weights",
        SCORERS,
        "kvgrad",
    ),
    "gradients: of a sum in place of squares": Mutation(
        "policy/providers/gradients.py",
        "states.float().square().sum()",
        "states.float().sum()",
        ("prefill/test_gradients.py",),
    ),
    "gradients: later tokens are seen": Mutation(
        "ops/attention_gradient.py",
        "masked_fill((positions > seen) | (positions < first), -torch.inf)",
        "masked_fill(positions < first, -torch.inf)",
        ("ops/test_attention_gradient.py", "prefill/test_gradients.py"),
    ),
    "qaq: more error where more attention": Mutation(
        "policy/storage/qaq.py",
        "value = (12 / total).sqrt() * self.value_error / weights",
        "value = (12 / total).sqrt() * self.value_error * weights",
        ("policy/test_storage.py",),
        "qaq",
    ),
    "paired: unit directions keep the length that rounding gives them": Mutation(
        "cache/forms/_shared_directions.py",
        "length / other.masked_fill(other == 0, 1.0)",
        "length / length.masked_fill(other == 0, 1.0)",
        ("cache/test_quantized_pairs.py",),
        "loop or levels",
    ),
    "quantization: fields of a code weigh alike": Mutation(
        "ops/cpu/quantized_attention_kernels.py",
        "np.float32(1 << left)",
        "np.float32(1)",
        ("ops/test_quantized_attention.py",),
        "odd",
    ),
    "crafted: whatever stood before": Mutation(
        "cache/chunk_entries.py",
        "alpha * self.impact() * (1 - self.overlap(now))",
        "alpha * self.impact()",
        ("cache/test_chunk_profile.py",),
    ),
    "crafted: in any order": Mutation(
        "cache/chunk_entries.py",
        "/ sum(masses) * (1 - swapped)",
        "/ sum(masses)",
        ("cache/test_chunk_profile.py",),
    ),
    "crafted: tokens that look inward": Mutation(
        "cache/chunk_entries.py",
        "key=lambda token: -self.tokens[token]",
        "key=lambda token: self.tokens[token]",
        ("cache/test_chunk_profile.py",),
    ),
    "anchored: far anchors count most": Mutation(
        "prefill/schedules/anchored.py",
        "weights = (-away).softmax(0)[:, None, :, None]",
        "weights = away.softmax(0)[:, None, :, None]",
        ("prefill/test_contexts.py",),
        "mean_of_the_anchors",
    ),
    "anchored: changes of keys where they stand": Mutation(
        "prefill/schedules/anchored.py",
        "moved = entries.moved_to(base.start, spec)",
        "moved = entries",
        ("prefill/test_contexts.py",),
        "rotated_as",
    ),
    "layer_reuse: from the receiver's embeddings": Mutation(
        "models/layer_reuse.py",
        "states = embedded if states is None else states.to(embedded)",
        "states = embedded",
        ("models/test_layer_reuse.py",),
    ),
    "layer_reuse: the receiver does not see the prefix": Mutation(
        "models/layer_reuse.py",
        "if self._before is not None:",
        "if self._before is None:",
        ("models/test_layer_reuse.py",),
        "prefix",
    ),
    "layer_reuse: what is taken stays as it was read": Mutation(
        "prefill/layer_reuse.py",
        "found = self._own.find(spec, prefix, ids)\n        if found is not None or",
        "found = self._sender.source.find(spec, prefix, ids)\n        if found is not None or",
        ("prefill/test_layer_reuse.py",),
    ),
    "a2ats: metric without its root": Mutation(
        "recall/a2ats.py",
        "return self.unrotated_keys(head, entries, first) @ self._roots[head]",
        "return self.unrotated_keys(head, entries, first)",
        ("recall/test_a2ats.py",),
    ),
    "a2ats: clipped the other way": Mutation(
        "recall/a2ats.py",
        "(queries.shape[1],), self._part.clip)",
        "(queries.shape[1],), -self._part.clip)",
        ("recall/test_a2ats.py",),
    ),
    "projected: pruning turned round": Mutation(
        "recall/projected.py",
        "between[number, linked] >= apart[number]",
        "between[number, linked] <= apart[number]",
        ("recall/test_projected.py",),
    ),
    "projected: no links back to pivots": Mutation(
        "recall/projected.py",
        "torch.cat([heads, tails]), torch.cat([tails, heads])",
        "heads, tails",
        ("recall/test_projected.py",),
    ),
    "positionless: keys keep their rotation": Mutation(
        "recall/_unrotated_keys.py",
        "return rotate(keys[None], -positions, self._radians)[0]",
        "return keys",
        ("recall/test_positionless.py",),
    ),
    "positionless: products before votes": Mutation(
        "recall/positionless.py",
        "order = order[torch.argsort(votes[order], descending=True, stable=True)]",
        "order = order[torch.argsort(best[order], descending=True, stable=True)]",
        ("recall/test_positionless.py",),
    ),
    "gapless: one position too far": Mutation(
        "cache/forms/gapless.py",
        "new = behind - len(positions) + ranks",
        "new = behind - len(positions) + ranks - 1",
        ("cache/test_gapless.py",),
    ),
    "subgen: former draws lose their mass": Mutation(
        "policy/compensation/subgen.py",
        "each = self.mass / max(int(self.draws.sum()), 1)",
        "each = 1.0 / max(int(self.draws.sum()), 1)",
        ("policy/test_subgen.py", "policy/test_compensation_and_protection.py"),
        "subgen or estimates or Subgen",
    ),
    "subgen: a key sample stands for itself": Mutation(
        "policy/compensation/subgen.py",
        "out[rows] = counts * weights[rows].sum() / samples",
        "out[rows] = counts * weights[rows]",
        ("policy/test_subgen.py", "policy/test_compensation_and_protection.py"),
        "subgen or equal_keys or Subgen",
    ),
    "non_causal: without lengths of values": Mutation(
        "policy/scorers/non_causal.py",
        "running_mean(sums * lengths, NEIGHBORS)",
        "running_mean(sums, NEIGHBORS)",
        SCORERS,
        "non_causal",
    ),
    "compactor: leverage subtracted": Mutation(
        "policy/scorers/compactor.py",
        "self._weight(observation) * leverage + attention",
        "attention - self._weight(observation) * leverage",
        SCORERS,
        "compactor",
    ),
    "fastgen: latest and attended in turn": Mutation(
        "policy/scorers/fastgen.py",
        "SPECIAL, PUNCTUATION, ATTENDED, LATEST = 4.0, 3.0, 2.0, 1.0",
        "SPECIAL, PUNCTUATION, ATTENDED, LATEST = 4.0, 3.0, 1.0, 2.0",
        SCORERS,
        "fastgen",
    ),
    "recovery: the query head that recovers most": Mutation(
        "policy/budgets/recovery.py",
        "mark].sum(1).amin()",
        "mark].sum(1).amax()",
        ("policy/test_fastgen.py",),
    ),
    "lazy_layers: the least lazy are cut": Mutation(
        "policy/budgets/lazy_layers.py",
        "key=lambda index: -laziness[index]",
        "key=lambda index: laziness[index]",
        ("policy/test_fastgen.py",),
    ),
    "pyramid: groups rise": Mutation(
        "policy/budgets/pyramid.py",
        "max(bottom - fall * group, 0.0)",
        "max(bottom + fall * group, 0.0)",
        ("policy/test_layer_budgets.py",),
        "groups or pyramid",
    ),
    "window: gathers where it is to locate": Mutation(
        "policy/units/window.py",
        "self.task is Task.GIVEN or _asks(observation) else 1.0",
        "self.task is Task.GIVEN or not _asks(observation) else 1.0",
        ("policy/test_values_and_units.py",),
        "window or asks",
    ),
    "squeezed: every coarse cluster survives": Mutation(
        "recall/squeezed.py",
        "return self.cluster_sizes * stays.gather",
        "return self.cluster_sizes + 0 * stays.gather",
        ("recall/test_squeezed.py",),
        "levels or survivors",
    ),
    "squeezed: coarse clusters weigh alike": Mutation(
        "recall/squeezed.py",
        "self._coarse_sizes[head].index_add_(0, labels + old, sizes)",
        "self._coarse_sizes[head].index_add_(0, labels + old, sizes.clamp(max=1.0))",
        ("recall/test_squeezed.py",),
        "levels",
    ),
    "rewatch: a question ends no choice": Mutation(
        "recall/rewatch.py",
        "self._latest, self._course = before.float(), torch.zeros(2, dtype=torch.int64)",
        "self._latest = before.float()",
        ("recall/test_rewatch.py",),
        "question",
    ),
    "context_refresh: shares rise with depth": Mutation(
        "policy/timing/context_refresh.py",
        "kept = (1 - self.share) * (math.cos(math.pi * depth) + 1) / 2 + self.share",
        "kept = (1 - self.share) * (1 - math.cos(math.pi * depth)) / 2 + self.share",
        ("policy/test_timing.py",),
        "refresh or survivors",
    ),
    "context_refresh: survivors are judged again": Mutation(
        "policy/timing/context_refresh.py",
        "stays |= positions < behind - self.tokens",
        "stays |= positions < start",
        ("policy/test_timing.py",),
        "refresh or survivors",
    ),
    "recent_attention: queries of the pass alone": Mutation(
        "policy/scorers/recent_attention.py",
        "latest = observation.latest.extended(latest)",
        "latest = latest.last(self.window)",
        ("policy/test_published_scores.py",),
        "recent_attention",
    ),
    "needle_rank: the worst heads first": Mutation(
        "models/measurements/needle_rank.py",
        "key=lambda head: numbers[head])",
        "key=lambda head: -numbers[head])",
        ("models/test_measurements.py",),
        "ranks",
    ),
    "key_cosine: every head searches": Mutation(
        "policy/scorers/key_cosine.py",
        "best if not order or order[head] < self.share else torch.zeros_like(best)",
        "best",
        ("policy/test_published_scores.py",),
        "share_of_a_measured",
    ),
    "entropy_chunk: even chunks are cut": Mutation(
        "policy/units/entropy_chunk.py",
        "(entropy < entropy.median())",
        "(entropy > entropy.median())",
        ("policy/test_values_and_units.py",),
        "entropy or spiky",
    ),
    "entropy_chunk: what is left comes with its chunk": Mutation(
        "policy/units/entropy_chunk.py",
        "turn[chunks].masked_fill(is_left, len(sizes))",
        "turn[chunks]",
        ("policy/test_values_and_units.py",),
        "entropy or spiky",
    ),
    "shot: examples beyond the budget stay whole": Mutation(
        "policy/units/shot.py",
        "labels.bincount()[labels] > self.longest",
        "labels.bincount()[labels] > 10 * self.longest",
        ("policy/test_shot.py",),
    ),
    "a2ats: queries of the text stay rotated": Mutation(
        "cache/forms/tiered.py",
        "queries = rotate(queries, -new.positions, radians)",
        "queries = rotate(queries, 0 * new.positions, radians)",
        ("recall/test_a2ats.py",),
    ),
}


def main(names: list[str]) -> int:
    """Run the mutations whose names contain one of these, or all; 1 if one survived."""
    chosen = {
        name: each
        for name, each in MUTATIONS.items()
        if not names or any(part in name for part in names)
    }
    survived = 0
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder)
        _copy(checkout)
        for name, mutation in chosen.items():
            started = time.perf_counter()
            noticed = _is_noticed(checkout, mutation)
            survived += not noticed
            seconds = time.perf_counter() - started
            print(f"{'noticed ' if noticed else 'survived'} {seconds:5.0f} s  {name}", flush=True)
    print(f"{len(chosen) - survived} of {len(chosen)} noticed")
    return int(survived > 0)


def _copy(checkout: Path) -> None:
    """Copy sources and tests into an empty folder."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "results")
            shutil.copytree(source, checkout / name, ignore=ignored)
        else:
            shutil.copy(source, checkout / name)


def _is_noticed(checkout: Path, mutation: Mutation) -> bool:
    """True if tests fail with the mutation; the source is restored.

    Raises:
        SystemExit: the source has not the text exactly once.
    """
    file = checkout / "src" / "larder" / mutation.file
    text = file.read_text(encoding="utf-8")
    if text.count(mutation.old) != 1:
        sys.exit(f"{mutation.file} has {mutation.old!r} {text.count(mutation.old)} times, not once")
    file.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
    command += ["-m", MARKS]  # the default ones leave out what takes over .4 s
    command += ["-k", mutation.chosen] if mutation.chosen else []
    command += [str(checkout / "tests" / test) for test in mutation.tests]
    environment = os.environ | {"PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, check=False
    )
    file.write_text(text, encoding="utf-8")
    if done.returncode not in (0, 1):
        sys.exit(f"the tests of {mutation.file} did not run:\n{done.stdout[-2000:]}")
    return done.returncode == 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
