"""The fastest configuration that fits, among the switches that save memory.

All that saves is switched on first. Then one switch after another, the one that costs most time
first, goes back as far as what is left still fits. So what stays on is needed, and each switch that
stays knows what a run without it would take. Exact switches come before coarser optimizer state.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from solotune.config import Component
from solotune.errors import ConfigError
from solotune.memory import is_layer_major
from solotune.plan.budget import MARGIN, Budget
from solotune.plan.device_profile import DeviceProfile
from solotune.plan.needs import GIB, Planned

Values = dict[str, Any]  # of config keys

# What a switch costs besides, for people; the time comes from the simulation.
LABELS = {
    "resident_layers": "bit-exact",
    "optimizer_state": "bit-exact",
    "optimizer_in_bwd": "bit-exact; with clipping reordered",
    "enable_activation_checkpointing": "bit-exact",
    "enable_activation_offloading": "bit-exact",
    "activation_offload_to": "bit-exact",
    "ac_mode": "bit-exact",
    "ac_option": "bit-exact",
    "batch_size": "reordered",
    "gradient_accumulation_steps": "reordered",
    "optimizer": "approximate",
}
_OURS = ("solotune.optim.AdamWKahan", "solotune.optim.LionKahan")
_FORMATS = (("int8", "bf16"), ("int8", "int8"), ("none", "int8"))  # of residual and state_dtype


@dataclass
class Candidate:
    """Values of config keys, and what a run with them needs."""

    values: Values
    planned: Planned
    excess: float  # how far it is from fitting; 0: it fits
    seconds: float | None  # of a step, where a device is known

    @property
    def fits(self) -> bool:
        return self.excess == 0


@dataclass
class Found:
    """The result of a search."""

    best: Candidate  # or, where nothing fits, the closest
    runner_up: Candidate | None
    without: dict[str, Candidate] = field(default_factory=dict)  # a key as it was, the rest as best
    tried: int = 0


class Search:
    """Looks for a configuration within a budget; `plan` simulates a Config."""

    def __init__(
        self,
        cfg: Any,
        *,
        plan: Callable[[Any], Planned],
        validate: Callable[[Any], None],
        budget: Budget,
        profile: DeviceProfile | None,
        blocks: int,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.cfg, self._plan, self._validate = cfg, plan, validate
        self.budget, self.profile, self.blocks, self._tell = budget, profile, blocks, tell
        self._known: dict[str, Candidate | None] = {}

    def run(self) -> Found:
        """Return the best configuration; raises ConfigError where the config has no such keys."""
        found = self._exact({})
        if not found.best.fits:
            for values in self._coarser():
                coarse = self._exact(values)
                if coarse.best.fits or coarse.best.excess < found.best.excess:
                    found = coarse
                if found.best.fits:
                    break
        found.tried = len(self._known)
        others = [c for c in self._fitting() if c.values != found.best.values]
        found.runner_up = min(others, key=self._order, default=None)
        return found

    def _exact(self, fixed: Values) -> Found:
        """Search the exact switches with some values given."""
        switches = self._switches()
        levels = {name: len(options) - 1 for name, options in switches.items()}
        candidate = self._try(switches, levels, fixed)
        for name in ("optimizer_state", "activations"):  # the last option spares the host
            lower = levels | {name: levels[name] - 1} if name in levels else levels
            closer = self._try(switches, lower, fixed)
            if closer is not None and (candidate is None or closer.excess <= candidate.excess):
                candidate, levels = closer, lower
        if candidate is None:
            raise ConfigError("no combination of the memory keys is valid with this config")
        best, without = candidate, {}
        if candidate.fits:
            for name, options in switches.items():
                for level in range(levels[name]):
                    other = self._try(switches, levels | {name: level}, fixed)
                    if other is not None and other.fits:
                        best, levels = other, levels | {name: level}
                        break
                    if other is not None and level == 0:
                        without |= dict.fromkeys(options[0], other)
            best = min(self._fitting(), key=self._order)
        return Found(best, None, without)

    def _switches(self) -> dict[str, list[Values]]:
        """Return each switch's values, from the fastest to the one that takes least."""
        cfg, blocks = self.cfg, self.blocks
        rows, total = cfg.batch_size, cfg.batch_size * cfg.gradient_accumulation_steps
        splits = [n for n in range(rows, 0, -1) if rows % n == 0]
        shares = dict.fromkeys((blocks * 3 // 4, blocks // 2, blocks // 4, 0))
        whole = {"ac_mode": "full", "ac_option": None}
        switches: dict[str, list[Values]] = {
            "resident_layers": [
                {"resident_layers": None},
                *({"resident_layers": n} for n in shares if n < blocks),
            ],
            "optimizer_state": [{"optimizer_state": w} for w in ("device", "host", "disk")],
            "checkpointing": [
                {"enable_activation_checkpointing": on} | whole for on in (False, True)
            ],
            "activations": [
                {"enable_activation_offloading": False, "activation_offload_to": "host"},
                {"enable_activation_offloading": True, "activation_offload_to": "host"},
                {"enable_activation_offloading": True, "activation_offload_to": "disk"},
            ],
            "optimizer_in_bwd": [{"optimizer_in_bwd": on} for on in (False, True)],
            "batch": [{"batch_size": n, "gradient_accumulation_steps": total // n} for n in splits],
        }
        keys = {f.name for f in dataclasses.fields(cfg)}
        return {name: o for name, o in switches.items() if keys.issuperset(o[0])}

    def _coarser(self) -> Iterator[Values]:
        """Yield optimizers with fewer bytes of state, the finer first."""
        optimizer: Component = self.cfg.optimizer
        given = optimizer.arguments
        now = None
        if optimizer.path in _OURS:
            now = _bytes_each(given.get("residual", "int16"), given.get("state_dtype", "fp32"))
        else:
            shared = {k: given[k] for k in ("lr", "betas", "weight_decay") if k in given}
            optimizer = dataclasses.replace(optimizer, path=_OURS[0], arguments=shared, written={})
        for residual, state_dtype in _FORMATS if self.cfg.dtype == "bf16" else ():
            if now is None or _bytes_each(residual, state_dtype) < now:
                arguments = {"residual": residual, "state_dtype": state_dtype}
                coarser = optimizer.arguments | arguments
                yield {"optimizer": dataclasses.replace(optimizer, arguments=coarser)}

    def _try(
        self, switches: Mapping[str, Sequence[Values]], levels: Mapping[str, int], fixed: Values
    ) -> Candidate | None:
        """Return the candidate of some levels; None where the recipe refuses it."""
        values = dict(fixed)
        for name, level in levels.items():
            values |= switches[name][level]
        if values.get("optimizer_in_bwd") is False:
            values["resident_layers"] = None
        cfg = changed(self.cfg, values)
        if is_layer_major(vars(cfg)):  # has its own: what has no effect stays as it was
            for name in ("enable_activation_checkpointing", "enable_activation_offloading"):
                values[name] = getattr(self.cfg, name)
            cfg = changed(self.cfg, values)
        key = repr(sorted(values.items(), key=lambda item: item[0]))
        if key not in self._known:
            try:
                self._validate(cfg)
            except ConfigError:
                self._known[key] = None
            else:
                self._known[key] = self._measured(cfg, values)
        return self._known[key]

    def _measured(self, cfg: Any, values: Values) -> Candidate:
        planned = self._plan(cfg)
        excess = self.budget.excess(planned.needs, margin=MARGIN)
        seconds = planned.seconds(self.profile) if self.profile else None
        words = " ".join(overrides(self.cfg, values)) or "as it is"
        verdict = "fits" if not excess else f"{planned.needs.reserved / GIB:.1f} GiB"
        self._tell(f"  {verdict:<10} {words}")
        return Candidate(values, planned, excess, seconds)

    def _fitting(self) -> list[Candidate]:
        return [c for c in self._known.values() if c is not None and c.fits]

    def _order(self, candidate: Candidate) -> tuple[bool, float, int, int]:
        """Return what sorts candidates: exact ones first, then by time, copies, what changes."""
        is_coarse = "optimizer" in candidate.values
        seconds, needs = candidate.seconds or self._guess(candidate), candidate.planned.needs
        changes = len(list(overrides(self.cfg, candidate.values)))
        return is_coarse, float(f"{seconds:.3g}"), needs.to_device + needs.to_host, changes

    def _guess(self, candidate: Candidate) -> float:
        """Return a time for comparisons without a device: that of a 4090 and its bus."""
        from solotune.plan.device_profile import find_profile

        return candidate.planned.seconds(find_profile("4090"))


def changed(cfg: Any, values: Values) -> Any:
    """Return a Config with other values; it keeps its origin."""
    other = dataclasses.replace(cfg, **values)
    object.__setattr__(other, "_origin", cfg._origin)
    return other


def overrides(cfg: Any, values: Values) -> Iterator[str]:
    """Yield the words that turn a config into one with these values."""
    for key, value in values.items():
        old = getattr(cfg, key)
        if value == old:
            continue
        if not isinstance(value, Component):
            yield f"{key}={value}"
            continue
        if value.path != old.path:
            yield f"{key}={value.path}"
        for name, argument in value.arguments.items():
            if value.path != old.path or old.arguments.get(name) != argument:
                yield f"{key}.{name}={argument}"


def _bytes_each(residual: str, state_dtype: str) -> int:
    """Return the bytes of state a parameter, of two moments: what formats are compared by."""
    moment = {"fp32": 4, "bf16": 2, "int8": 1}[state_dtype]
    return {"int16": 2, "int8": 1, "none": 0}[residual] + 2 * moment
